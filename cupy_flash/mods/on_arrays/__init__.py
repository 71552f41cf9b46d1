"""Evaluation of modifications on NumPy or CuPy arrays."""
