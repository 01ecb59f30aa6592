"""`python -m megalith.convert`: the command `megalith convert`."""

import sys

from megalith.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["convert", *sys.argv[1:]]))
