"""Arrays of any library: what they are, how they lie in memory, and the way back to their kind."""
