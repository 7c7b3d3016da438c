"""`python -m pagedkv` is the command `pagedkv`."""

import sys

from pagedkv.cli import main

if __name__ == "__main__":
    sys.exit(main())
