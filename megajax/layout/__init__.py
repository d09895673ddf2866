"""The kinds of layers, their stages and segments: what follows from a config before a mesh of devices exists."""
