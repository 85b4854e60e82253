"""OpenRLHF's openrlhf/models/, from its files: the package wants flash_attn and deepspeed."""

import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

_package = ModuleType("openrlhf_models")
_package.__path__ = [str(Path(find_spec("openrlhf").origin).with_name("models"))]
sys.modules["openrlhf_models"] = _package
with patch.dict(sys.modules, deepspeed=ModuleType("deepspeed")):  # utils imports it for MoE layers
    utils = import_module("openrlhf_models.utils")
    loss = import_module("openrlhf_models.loss")
