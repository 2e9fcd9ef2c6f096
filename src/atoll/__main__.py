"""``python -m atoll`` is the command; torchrun needs it in this form."""

import sys

from atoll.cli import main

if __name__ == "__main__":
    sys.exit(main())
