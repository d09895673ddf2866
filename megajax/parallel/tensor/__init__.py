"""Linear layers over `tensor`."""
