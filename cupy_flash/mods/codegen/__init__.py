"""Generation of CUDA source from expressions."""
