"""Prompts, tasks and rewards, and the batch of a rollout."""
