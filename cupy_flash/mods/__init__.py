"""Mask and score modifications: Python functions, traced and compiled as CUDA source."""
