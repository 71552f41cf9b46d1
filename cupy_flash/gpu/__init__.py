"""Everything that runs on a GPU: compiling, argument structs, launches."""
