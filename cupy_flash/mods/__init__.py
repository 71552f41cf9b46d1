"""Modifications of scores and masks: Python functions, traced into device text."""
