"""Weights between storage and compute: gathered and reduced, fused and split, and their FP8 scales."""
