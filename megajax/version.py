"""The version of megajax."""

VERSION = "0.1.0"
