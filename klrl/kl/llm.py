"""Alias of :mod:`klrl.envs.llm.transforms.kl`, a name in the documentation."""

import sys
from importlib import import_module

sys.modules[__name__] = import_module("klrl.envs.llm.transforms.kl")
