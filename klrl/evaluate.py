"""Makes ``python -m klrl.evaluate`` run ``klrl evaluate``."""

from klrl.cli.wrapper import as_module

main = as_module("evaluate", __name__)
