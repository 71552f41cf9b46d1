"""What is timed: cases, their arrays and options."""
