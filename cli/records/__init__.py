"""Tables, record files and plots of measurements."""
