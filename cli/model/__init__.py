"""Models and counters: `roofline` and `profile`."""
