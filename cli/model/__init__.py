"""Performance models, hardware counters, and the commands `roofline` and `profile`."""
