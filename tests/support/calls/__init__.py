"""Forward calls for tests, and what is right for them."""
