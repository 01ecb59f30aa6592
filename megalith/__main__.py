"""`python -m megalith`, the command `megalith`."""

import sys

from megalith.cli.main import main

sys.exit(main())
