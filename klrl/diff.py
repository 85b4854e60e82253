"""Makes ``python -m klrl.diff`` run ``klrl diff``."""

from klrl.cli.wrapper import as_module

main = as_module("diff", __name__)
