"""Choice of the kernel family and tile for a problem, with its reasons."""
