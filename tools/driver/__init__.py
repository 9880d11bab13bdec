"""The stages of a run in order, here or on the cluster."""
