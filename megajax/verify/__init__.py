"""Does a mesh train the same model as one device? Compares both with a small version of a config, on the CPU."""

from megajax.verify.runs import Difference, compare
from megajax.verify.shrink import shrink

__all__ = ["Difference", "compare", "shrink"]
