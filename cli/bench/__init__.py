"""The command `bench`, and the commands that read its records."""
