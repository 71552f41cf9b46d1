"""Ranks that divide the work of a call, for tests of `cupy_flash.parallel`."""
