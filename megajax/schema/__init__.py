"""The keys of the config: sections, types and limits."""
