"""Command line, ``python -m tools.driver``."""

import sys

from tools.driver.commands import main

try:
    sys.exit(main())
except KeyboardInterrupt:
    print("stopped; an experiment goes on by itself, and the same command follows it again", file=sys.stderr)
    sys.exit(130)
