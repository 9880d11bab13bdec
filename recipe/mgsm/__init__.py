"""Retention: German mathematics without tools, how a checkpoint answers it and how an answer is read."""
