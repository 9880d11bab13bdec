"""What a task family is made of."""
