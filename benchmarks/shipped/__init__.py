"""The results in ``docs/results/``: sweeps through the command line, then tables and pictures.

python -m benchmarks.shipped            # all of them; what is finished is not run again
python -m benchmarks.shipped 1 4        # two of them

A YAML per result: its words, sweeps and columns. Where settings are compared by task, ``compare``
in it says what is drawn; the others have a module for their own mathematics. To add one: a YAML,
and its line in ``__main__.py``.
"""
