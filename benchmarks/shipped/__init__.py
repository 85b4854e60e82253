"""The results in ``docs/results/``: sweeps through the command line, then tables and pictures.

python -m benchmarks.shipped            # all of them; what is finished is not run again
python -m benchmarks.shipped 1 4        # two of them

One module per result: its sweeps, what is computed, what is drawn. To add one: a module with a
``RESULT``, and its line in ``__main__.py``.
"""
