"""``python -m klrl.doctor``: are this machine's KL numbers true?"""
