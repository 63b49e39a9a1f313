"""C++ and Triton kernels of the codecs, and the dispatch between them and the PyTorch reference."""
