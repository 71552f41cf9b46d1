"""Expressions of traced functions, their analysis and transformations."""
