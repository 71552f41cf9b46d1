"""Which family and tile, and why."""
