"""`compile`, and compilation in processes."""
