"""The formula in float64, and the error rule."""
