"""Checks of the arguments of calls, and the problems that they describe."""
