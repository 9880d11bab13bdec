"""A tiny checkpoint to try everything with, and what it is shown."""
