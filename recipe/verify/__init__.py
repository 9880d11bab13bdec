"""Verification: whether a run's evidence holds, and what it says."""
