"""A checkpoint as a policy: how it is read, its chat, and how it is sampled."""
