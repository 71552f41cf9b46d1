"""`tune`: sweeps over tiles."""
