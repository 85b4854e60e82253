"""``actor`` against other settings, and what its ranges cannot say."""

from __future__ import annotations

from klrl.base.errors import ConfigError
from klrl.config import (
    Config,
    CustomActorConfig,
    JobConfig,
    LanguageConfig,
    SortDigitsConfig,
)
from klrl.config.rules import refuse_empty

#: Two layers of it have 4e9 weights between them.
_WIDEST = 65_536


def check_init(c: JobConfig) -> None:
    """An empty name is no run."""
    refuse_empty("actor.init", c.actor.init, "give a trained run: actor.init=outputs/RUN")


def check_hidden(c: Config) -> None:
    """Every layer has a width."""
    if not c.actor.hidden or not all(1 <= width <= _WIDEST for width in c.actor.hidden):
        raise ConfigError(
            f"actor.hidden={c.actor.hidden}: give widths >= 1 (and <= {_WIDEST}), as in [64,64]"
        )


def check_model(c: LanguageConfig) -> None:
    """A model that is named; only the smallest task makes its own."""
    remedy = "give a folder written by save_pretrained, a hub id, or smollm2"
    own = isinstance(c.env, SortDigitsConfig)
    null = ", or null for a small one" if own else ""
    refuse_empty("actor.model", c.actor.model, remedy + null)
    if not own and c.actor.model is None and c.actor.init is None:
        raise ConfigError(f"actor.model=null: env={c.env.name} needs a model; {remedy}")


def check_lora(c: LanguageConfig) -> None:
    """Adapters that leave the policy one policy, on modules that have names."""
    lora = c.actor.lora
    if lora.dropout:
        raise ConfigError(
            f"actor.lora.dropout={lora.dropout:g}: the updated policy would differ from the one "
            "that sampled; set it to 0"
        )
    targets = lora.target_modules
    listed = isinstance(targets, list) and targets and all(isinstance(t, str) for t in targets)
    if targets != "all-linear" and not listed:
        raise ConfigError(
            f"actor.lora.target_modules={targets}: give names as in [q_proj,v_proj], or all-linear"
        )


def check_own(c: Config) -> None:
    """Networks of the user's own share nothing."""
    if isinstance(c.actor, CustomActorConfig) and c.actor.share_trunk:
        raise ConfigError(
            "actor.share_trunk=true: networks of your own share nothing; set it to false"
        )
