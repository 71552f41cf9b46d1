"""Tests on a GPU, and stand-ins for one."""
