"""Tokens and experts on different devices."""
