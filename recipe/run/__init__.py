"""One run: what was frozen, a stage's life and its result, its processes, and its edge to Determined."""
