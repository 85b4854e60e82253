"""Sweeps: many jobs in one folder; a stopped sweep can be resumed.

``jobs.py`` defines a job and its status, ``worker.py`` runs a job, ``supervisor.py`` starts and
restarts jobs, on the backends of ``launchers.py``, ``queue.py`` (SLURM; its commands:
``slurm.py``) and ``cluster.py`` (Ray). ``search.py`` chooses jobs by results so far, ``ledger.py``
prints and records, ``sweep_file.py`` reads and writes ``sweep.json``. ``run.py`` checks and runs
the whole sweep and handles signals. ``plan.py`` lists its jobs. Only ``worker.py`` imports torch,
when it runs a job.
"""
