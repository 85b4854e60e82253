"""The contenders of ``benchmarks/throughput.py``: each runs alone and prints one line of JSON."""
