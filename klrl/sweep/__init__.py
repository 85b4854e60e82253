"""Sweeps: many jobs in one folder, that can be started again.

``words.py`` splits a command line into jobs, ``jobs.py`` says what a job is and how it stands,
``worker.py`` runs one, ``launchers.py`` says where, ``search.py`` chooses jobs by their results,
``ledger.py`` tells and records, ``run.py`` is the whole. No torch outside ``worker.py``.
"""
