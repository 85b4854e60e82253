"""The command line: argument lists, and one wrapper for exit codes and one-line errors.

``main.py`` finds the command, ``wrapper.py`` runs it, and one module per command parses its
arguments. A command is a function from arguments to an exit code; other modules of klrl do its
work.
"""
