"""Does a mesh train the same model as one device? Compares both with a small version of a config, on the CPU."""
