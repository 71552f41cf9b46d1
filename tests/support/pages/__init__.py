"""What tests of pages and of the project's metadata share."""
