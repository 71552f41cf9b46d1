"""Models, operators and ranks for tests with PyTorch."""
