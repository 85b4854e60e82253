"""A control run: rollout, KL, advantage, update and evaluation."""
