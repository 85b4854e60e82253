"""Utilities for all of klrl: errors, files, text, signals. They import nothing else of klrl."""
