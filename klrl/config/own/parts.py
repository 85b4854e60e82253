"""Lists the custom parts of a job, and the arguments that klrl gives to each."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path

from klrl.base.sources import belongs_to_klrl
from klrl.config.choices import CHOICES
from klrl.config.fields import ChoiceConfig, OwnPart
from klrl.config.jobs import Env, JobConfig
from klrl.config.schemas.language import LanguageEnvConfig

#: Setting of a custom part -> names of the arguments that klrl gives to the part.
GIVEN: Mapping[str, tuple[str, ...]] = {
    "env": ("num_envs", "device"),
    "actor": ("inputs", "outputs"),
    "actor.own_critic": ("inputs",),
    "env.wrappers": ("env",),
    "reference": ("observation", "inputs", "outputs"),
    "RUN": ("observation", "inputs", "outputs"),
    "other": ("observation", "inputs", "outputs"),
    "kl.own_estimator": ("log_ratio",),
    "kl.own_divergence": ("log_ratio",),
    "controller": ("coef", "frames"),
    "logger": ("folder", "settings", "group", "axis"),
    "advantage": ("config", "critic", "reward_scale", "normalizer"),
    "loss": ("config", "reference_estimator", "divergence", "reward_scale"),
    "loss.own_beta_rule": ("config", "beta", "dtarg"),
}

#: Parts that get only the arguments that they name: their ``**kwargs`` get the user's alone.
BY_NAME = ("env",)


def own_parts(config: JobConfig) -> Iterator[tuple[str, OwnPart]]:
    """Yield the custom parts of a job, each with its setting, such as ``controller``."""
    for group in CHOICES:
        yield from parts_in(group, getattr(config, group))


def parts_in(group: str, part: ChoiceConfig) -> Iterator[tuple[str, OwnPart]]:
    """Yield the custom parts of one group, each with its setting."""
    if isinstance(part, OwnPart):
        yield group, part
    for f in dataclasses.fields(part):
        inner = getattr(part, f.name)
        if isinstance(inner, OwnPart):
            yield f"{group}.{f.name}", inner
        elif "own" in f.metadata:
            for i, each in enumerate(inner or ()):
                yield f"{group}.{f.name}[{i}]", each


def env_code(env: Env) -> Iterator[tuple[str, str, object]]:
    """Yield setting, value and args of ``env.id=module:Id`` and ``env.reward=module:function``.

    Leaves out reward models, and environments of klrl and of packages that klrl requires.
    """
    if isinstance(env, LanguageEnvConfig):
        for name in map(str, env.rewards):
            module, _, function = name.partition(":")
            if function and not is_reward_model(module, function):
                yield "env.reward", name, None
    elif ":" in env.id and not isinstance(env, OwnPart) and not belongs_to_klrl(top_level(env.id)):
        yield "env.id", env.id, env.kwargs


def top_level(target: str) -> str:
    """Return the module ``package`` of ``package.module:Name``, or the file of ``file.py:name``."""
    module = target.partition(":")[0]
    return module if module.endswith(".py") else module.partition(".")[0]


def is_reward_model(module: str, attribute: str) -> bool:
    """Return whether ``model:X`` is a reward model in folder X, not a function of ``model.py``."""
    if module != "model" or not attribute.isidentifier() or Path(attribute).is_dir():
        return module == "model"
    found = find_spec("model")  # its origin is None if it is a folder without __init__.py
    return not Path("model.py").is_file() and (found is None or found.origin is None)
