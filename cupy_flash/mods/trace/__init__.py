"""Tracing of Python functions into expressions."""
