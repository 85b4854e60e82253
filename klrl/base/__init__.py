"""Utilities for every room: errors, files, text, signals. They import nothing else of klrl."""
