"""Backward pass of the CPU backend."""
