"""Modifications for tests: random functions, their oracle, and generated CUDA source."""
