"""``python -m klrl.evaluate``, which is ``klrl evaluate``."""

from klrl.cli.wrapper import as_module

main = as_module("evaluate", __name__)
