"""Frozen records that describe an attention problem, and the checks of their values."""
