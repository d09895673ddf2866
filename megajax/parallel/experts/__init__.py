"""Experts on several devices."""
