"""Providers: the libraries and kernels that can compute a case."""
