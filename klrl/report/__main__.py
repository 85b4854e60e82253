"""``python -m klrl.report``, which is ``klrl report``."""

from importlib import import_module

main = import_module("klrl.cli.wrapper").as_module("report", __name__)
