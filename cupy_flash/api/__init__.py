"""Public functions of the package."""
