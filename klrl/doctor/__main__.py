"""``python -m klrl.doctor``, which is ``klrl doctor``."""

from importlib import import_module

main = import_module("klrl.cli.wrapper").as_module("doctor", __name__)
