"""Measures a machine: GPUs, links and disk before a run (`measurements`), and the rates for `megajax plan`."""
