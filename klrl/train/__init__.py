"""The algorithm, the same for control and language."""
