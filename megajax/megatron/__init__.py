"""Checkpoints of Megatron-Core: their weights into a run, without torch."""
