"""Records, scripts and runs of the command line for tests."""
