"""Command line, ``python -m tools.driver``."""

import sys

from tools.driver.commands import main

try:
    sys.exit(main())
except KeyboardInterrupt:
    print("stopped", file=sys.stderr)
    sys.exit(130)
