"""Utilities for all of klrl: errors, files, text, signals. They import no other part of klrl."""
