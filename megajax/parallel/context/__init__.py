"""Attention over `context`."""
