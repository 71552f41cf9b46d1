"""The command `compile`, and compilation of kernels in worker processes."""
