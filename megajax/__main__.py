"""`python -m megajax`: the `megajax` command."""

import sys

from megajax.commands import main

if __name__ == "__main__":
    sys.exit(main())
