"""Training: TRL's trainer, the tokenizer that it sees, and the checkpoints that it goes on from."""
