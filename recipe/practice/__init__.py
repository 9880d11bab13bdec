"""A tiny checkpoint to try everything with, and what it is shown."""

from pathlib import Path

SHIPPED = Path(__file__).parent / "shipped"  # the trained one, as ``python -m recipe.practice`` left it
