"""Run the command line as ``python -m atoll``, as torchrun requires."""

import sys

from atoll.import_path import forget_foreign_folders

if __name__ == "__main__":
    forget_foreign_folders()  # before other imports, which a file in the current folder could replace
    from atoll.cli import main

    sys.exit(main())
