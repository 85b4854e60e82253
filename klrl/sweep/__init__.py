"""Sweeps: many jobs in one folder; a sweep that stopped can be resumed.

``jobs.py`` defines a job and its status,
``worker.py`` runs one, ``supervisor.py`` starts them and starts them again, on the backends of
``launchers.py``, ``queue.py`` (SLURM; its commands: ``slurm.py``) and ``cluster.py`` (Ray);
``search.py`` chooses jobs by their results, ``ledger.py`` prints and records, ``sweep_file.py`` is
``sweep.json``, ``run.py`` checks and runs the whole sweep and handles signals; ``plan.py``
predicts the time, from what ``probe.py`` measures. Only ``worker.py`` and ``probe.py`` import
torch, when they run a job.
"""
