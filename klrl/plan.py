"""Makes ``python -m klrl.plan`` run ``klrl plan``."""

from klrl.cli.wrapper import as_module

main = as_module("plan", __name__)
