"""Runs sweeps: many jobs in one folder; a stopped sweep can be resumed.

``run.py`` checks and runs a sweep, and handles signals. ``jobs.py`` defines a job and its status;
``worker.py`` runs a job. ``supervisor.py`` starts and restarts jobs on a backend from
``launchers.py``, ``queue.py`` (SLURM, by the commands in ``slurm.py``) or ``cluster.py`` (Ray).
``search.py`` chooses jobs by the results so far. ``ledger.py`` prints and records results;
``sweep_file.py`` reads and writes ``sweep.json``.
No module imports torch when it is imported.
"""
