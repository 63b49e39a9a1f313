"""Kernels of the codecs: C++ for CPUs, Triton for GPUs, and the choice between them and the reference."""
