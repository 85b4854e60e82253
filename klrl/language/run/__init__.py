"""A language run: sampling, scoring, KL, update, record and evaluation."""
