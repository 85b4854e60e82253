"""The command line: argument lists, and one wrapper for exit codes and one-line errors.

``main.py`` finds the command, ``wrapper.py`` runs it, a module per command reads its arguments. A
command is a function from its words to an exit code; what it does stands elsewhere in klrl.
"""
