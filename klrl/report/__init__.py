"""``klrl report``, ``klrl diff`` and ``klrl ls``: read and compare runs, without torch."""
