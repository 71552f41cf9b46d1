"""Attention weights of chosen rows, their picture, and their sums over queries."""
