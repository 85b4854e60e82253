"""Lists, reads and compares runs: ``klrl report``, ``klrl diff``, ``klrl ls``."""
