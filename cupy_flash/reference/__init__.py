"""Reference implementations in float64, and error bounds for results in lower precision."""
