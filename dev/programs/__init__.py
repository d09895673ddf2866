"""Developers' proof that a change of the code changes no program; see `__main__.py`."""
