"""The command `tune`: sweeps over tiles."""
