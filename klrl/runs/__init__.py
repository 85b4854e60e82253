"""Writes and reads a run's folder: settings, manifest, rows, checkpoints."""
