"""The command line of cupy_flash.

One module per command, the others by concern. Imported as `cupy_flash.cli`, also from a checkout,
where the folder stands beside the package; imports within it are relative for that reason.
"""
