"""What a sweep would cost: ``python -m klrl.plan -m ...``.

``probe.py`` runs a job for some seconds and times its parts, ``estimate.py`` does the arithmetic,
``__main__.py`` the talking.
"""
