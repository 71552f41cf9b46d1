"""Compilation of kernels, their argument structs, and their launches on a GPU."""
