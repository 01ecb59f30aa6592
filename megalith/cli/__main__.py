"""`python -m megalith.cli`"""

import sys

from megalith.cli.main import main

sys.exit(main())
