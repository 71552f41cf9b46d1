"""Cases (the calls to time), their input arrays, and the options that define them."""
