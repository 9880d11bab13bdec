"""German order tasks: the facts of an order must be looked up, its total calculated."""
