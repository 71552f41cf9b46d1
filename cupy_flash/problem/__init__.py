"""Records of what is asked for, and every check of values."""
