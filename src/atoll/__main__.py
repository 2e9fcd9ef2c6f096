"""Run the command line as ``python -m atoll``, as torchrun requires."""

import sys

from atoll.cli import main

if __name__ == "__main__":
    sys.exit(main())
