"""What the policy said, rollout by rollout: a page to look at, or lines in a terminal."""
