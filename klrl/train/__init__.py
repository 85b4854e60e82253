"""The training algorithm, which control and language share."""
