"""`bench`, and what reads its records."""
