"""SkyRL's skyrl/backends/skyrl_train/utils/ppo_utils.py, by itself: its packages import servers."""

import sys
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import SimpleNamespace as Stub
from unittest.mock import MagicMock, patch

_UTILS = "skyrl.backends.skyrl_train.utils"
# What it calls of other files.
_OTHERS = {
    "torch_utils": Stub(
        masked_mean=lambda x, mask: (x * mask).sum() / mask.sum(),
        safe_exp_delta=lambda delta, clip, out_dtype: delta.clamp(-clip, clip).exp(),
    ),
    "off_policy_correction_utils": Stub(
        apply_off_policy_correction=lambda loss, old, mu, mask, config: (loss, mask, {})
    ),
}
_MODULES = {f"{_UTILS}.{name}": module for name, module in _OTHERS.items()}
_MODULES |= dict.fromkeys(("skyrl.train.config", "loguru", "jaxtyping"), MagicMock())
_MODULES |= dict.fromkeys(("skyrl.backends", "skyrl.backends.skyrl_train", _UTILS), MagicMock())
_spec = spec_from_file_location(
    "skyrl_ppo_utils",
    Path(find_spec("skyrl").origin).with_name("backends") / "skyrl_train/utils/ppo_utils.py",
)
ppo_utils = module_from_spec(_spec)
with patch.dict(sys.modules, _MODULES):
    _spec.loader.exec_module(ppo_utils)
