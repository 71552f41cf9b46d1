"""Arrays of any library: how to read them, their memory layout, and conversion of results back."""
