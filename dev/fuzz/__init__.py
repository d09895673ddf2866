"""Hostile inputs: damaged files of each format, read in processes with limits. `python -m dev.fuzz --help`."""
