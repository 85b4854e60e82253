"""``python -m klrl.diff``, which is ``klrl diff``."""

from klrl.cli.wrapper import as_module

main = as_module("diff", __name__)
