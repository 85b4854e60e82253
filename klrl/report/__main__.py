"""Makes ``python -m klrl.report`` run ``klrl report``."""

from importlib import import_module

main = import_module("klrl.cli.wrapper").as_module("report", __name__)
