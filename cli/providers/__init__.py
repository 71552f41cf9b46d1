"""Who can compute a case."""
