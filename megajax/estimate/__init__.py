"""A config's parameters, FLOPs and memory, without compilation."""
