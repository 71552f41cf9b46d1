"""Command line of cupy_flash: one module per command, and shared modules by concern.

The package is imported as `cupy_flash.cli`, also from a checkout, where this folder is next to
`cupy_flash`. Imports within it are therefore relative.
"""
