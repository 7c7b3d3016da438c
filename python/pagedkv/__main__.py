"""`python -m pagedkv` is the command `pagedkv`."""

import sys

from pagedkv.cli import main

sys.exit(main())
