"""Timing and checking of calls."""
