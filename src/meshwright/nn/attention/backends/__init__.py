"""Attention kernels, one a file; `meshwright.nn.attention.attention` chooses among them."""
