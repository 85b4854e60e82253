"""The command line: argument parsers, exit codes and one-line errors.

``main.py`` finds the command, and ``wrapper.py`` runs it. Each command has a module, with a
function that takes the arguments and returns an exit code.
"""
