"""Backward calls for tests, and the oracle that judges their results."""
