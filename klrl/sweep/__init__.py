"""Sweeps: many jobs in one folder; a sweep that stopped can be resumed.

``check.py`` checks the jobs of a command line, ``jobs.py`` defines a job and its status,
``worker.py`` runs one, ``launchers.py`` says where, ``queue.py`` in SLURM's queue (its commands:
``slurm.py``), ``search.py`` chooses jobs by their results, ``ledger.py`` prints and records,
``sweep_file.py`` is ``sweep.json``, ``run.py`` runs the whole sweep, or a single job, and
``stop.py`` handles signals; ``plan.py`` predicts the time, from what ``probe.py`` measures. Only
``worker.py`` and ``probe.py`` import torch, when they run a job.
"""
