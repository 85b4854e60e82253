"""``python -m klrl.report``: many runs in one offline page. Nothing in here imports torch."""
