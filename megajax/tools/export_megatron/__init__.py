"""Writes runs as checkpoints of Megatron-Core: `megajax export-megatron --help`."""
