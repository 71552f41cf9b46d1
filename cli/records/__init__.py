"""Tables, files and pictures of what was measured."""
