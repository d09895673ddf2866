"""Translates Megatron-LM's launch lines into configs: `megajax from-megatron --help`."""
