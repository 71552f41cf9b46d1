"""Calls with arrays in host memory, on the CPU backend or on copies in GPU memory."""
