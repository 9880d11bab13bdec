"""Command line, ``python -m recipe.practice``."""

import sys

from recipe.practice.checkpoint import main
from recipe.run.entrypoint import guarded

sys.exit(guarded(main))
