"""``python -m klrl.plan``, which is ``klrl plan``."""

from klrl.cli.wrapper import as_module

main = as_module("plan", __name__)
