"""Checks and dispatch of calls, from the arguments of public functions to a backend."""
