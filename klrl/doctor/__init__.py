"""``klrl doctor``: checks the gradient of a loss."""
