"""Prepared calls on a GPU: plans, loaded kernels and packed arguments, kept for later calls."""
