"""A shorter name for the module :mod:`klrl.envs.llm.transforms.kl`."""

import sys
from importlib import import_module

sys.modules[__name__] = import_module("klrl.envs.llm.transforms.kl")
