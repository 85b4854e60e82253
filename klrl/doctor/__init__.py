"""``klrl doctor``: checks the KL numbers of this install, or the gradient of a loss."""
