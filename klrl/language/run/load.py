"""Makes or loads the policy of a language run, and defines which weights a checkpoint contains."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from klrl.base.context import context_of
from klrl.base.errors import ConfigError
from klrl.base.files import expanded
from klrl.config import (
    AdvantageConfig,
    CheckpointReferenceConfig,
    LanguageConfig,
    ModelReferenceConfig,
    TextConfig,
)
from klrl.config.checks import typed_choice
from klrl.kl.reference import Loaded
from klrl.language.data.model_files import find_model
from klrl.language.data.sort_digits import BASE_MODEL
from klrl.language.model import smollm
from klrl.language.model.causal_lm import ValueHead, model_device, unwrapped, weight_of
from klrl.language.model.pretrained import CausalLM, load_causal_lm
from klrl.language.run.sampler import SpecialTokens
from klrl.runs.checkpoint import load_component
from klrl.runs.find import find_run
from klrl.runs.folder import RunFolder
from klrl.runs.machine import device_of
from klrl.runs.resume import stored_config


@dataclass(frozen=True)
class Policy:
    """The causal LM that samples and is trained; with ``advantage=gae`` also its value head."""

    causal: CausalLM
    value_head: ValueHead | None = None

    @property
    def model(self) -> nn.Module:
        """The causal LM; a ``PeftModel`` with LoRA."""
        return self.causal.model

    @property
    def special(self) -> SpecialTokens:
        """The ids that end a response, and the tokenizer's pad id."""
        return SpecialTokens(self.causal.eos, self.causal.tokenizer.pad_token_id)

    @property
    def actor_parameters(self) -> list[nn.Parameter]:
        """The trained parameters of the model: all, or only those of the adapters."""
        return [p for p in self.model.parameters() if p.requires_grad]

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The actor's and the value head's parameters."""
        critic = [] if self.value_head is None else list(self.value_head.parameters())
        return [*self.actor_parameters, *critic]


def within_contexts(policy: Policy, *scorers: nn.Module) -> Policy:
    """Return the policy with the shortest context of all, if other models score its responses."""
    contexts = [context_of(unwrapped(each).config) for each in (policy.model, *scorers)]
    known = [each for each in contexts if each is not None]
    return replace(policy, causal=replace(policy.causal, context=min(known))) if known else policy


def template_of(config: LanguageConfig) -> Mapping[str, object]:
    """Return the arguments of the chat template."""
    return config.env.template_kwargs if isinstance(config.env, TextConfig) else {}


def make_policy(
    config: LanguageConfig,
    *,
    chat: bool = False,
    say: Callable[[str], None] = print,
    key: str = "actor.model",
) -> Policy:
    """Load the base model and, with ``advantage=gae``, make a new value head.

    The other arguments are those of :func:`load_causal_lm`.
    """
    actor, device = config.actor, device_of(config.device)
    if config.mixed and config.learner.dtype is None:
        say(
            f"actor.dtype={actor.dtype}: is read as learner.dtype=mixed: float32 weights, "
            "bfloat16 arithmetic"
        )
    causal = load_causal_lm(
        find_base(config),
        key=key,
        chat=chat,
        dtype="float32" if config.mixed else actor.dtype,
        mixed=config.mixed,
        device=device,
        gradient_checkpointing=actor.gradient_checkpointing,
        lora=actor.lora if actor.lora.r else None,
        say=say,
    )
    critic = isinstance(config.advantage, AdvantageConfig)
    head = ValueHead(causal.model, detach=config.loss.separate_losses) if critic else None
    return Policy(causal, head)


def find_base(config: LanguageConfig) -> str | Path:
    """Return the base model's hub id or folder; klrl's own model if ``actor.model`` is null."""
    if config.actor.model == smollm.NAME:
        return smollm.smollm()
    return BASE_MODEL if config.actor.model is None else config.actor.model


#: The setting that names a reference's run or model.
_PATH = "reference.path"


def trained_policy(
    run: str | Path,
    which: str = "last",
    device: str = "cpu",
    setting: str = "run",
    compared_with: LanguageConfig | None = None,
    model: str | None = None,
) -> Policy:
    """Load the policy of a language run, frozen.

    ``setting`` gives ``run``, for messages. ``compared_with``: a job whose precision the policy
    should have, see :func:`_computing_as`. ``model``: current folder of the run's base model; None:
    the path stored in the run. With ``model`` or LoRA, base weights that differ from the
    checkpoint's digest are refused.

    Raises:
        ConfigError: no such run or checkpoint, a control run, or a missing or changed base model.
    """
    folder = find_run(str(run), setting)
    config = language_config(folder, setting)
    config = config if compared_with is None else _computing_as(config, compared_with)
    config = config if model is None else with_model(config, model)
    config.device = device
    policy = make_policy(config, say=lambda _: None)  # the run printed these lines when it began
    compared = config.actor.lora.r or model is not None
    base = BaseDigest(policy.model, config.actor.model) if compared else None
    weights = Weights(policy.model, policy.value_head, base=base)
    load_component(folder, which, "agent", weights, torch.device(device))
    policy.model.requires_grad_(False).eval()
    return policy


def trained_causal_lm(run: str | Path, which: str = "last", device: str = "cpu") -> CausalLM:
    """Implement :func:`klrl.api.load_policy` for language runs."""
    return trained_policy(run, which, device).causal


def load_reference(
    config: LanguageConfig, policy: Policy, described: Mapping[str, Any] | None
) -> Loaded:
    """Load the model of another run, or of a folder, as pi_ref for this run's policy.

    On resume, ``described`` is the manifest's description of the reference. Its weights then come
    from this run's checkpoint, so the other run's folder may be gone.
    """
    reference = config.reference
    assert isinstance(reference, CheckpointReferenceConfig | ModelReferenceConfig)
    if isinstance(reference, ModelReferenceConfig):
        described = {"actor": asdict(of_model(config, reference.path).actor)}
    if described is not None:
        network = replace(config, actor=typed_choice("actor", described))
        network = _computing_as(network, config)
        other = make_policy(network, say=lambda _: None, key=_PATH)
    else:
        assert isinstance(reference, CheckpointReferenceConfig)
        stored = language_config(find_run(reference.path, _PATH), _PATH)
        described = {"actor": asdict(stored.actor)}
        device = str(model_device(policy.model))
        other = trained_policy(reference.path, reference.which, device, _PATH, compared_with=config)
    require_same_tokens(f"{_PATH}={reference.path}", other, "this policy", policy)
    return other.model, described


def require_same_tokens(
    setting: str, other: Policy, whose: str, policy: Policy, *, chat: bool = False
) -> None:
    """Refuse a policy with a different vocabulary or a different number of logits.

    With ``chat`` the two must not have different chat templates; a base model may have none.
    """
    if other.causal.tokenizer.get_vocab() != policy.causal.tokenizer.get_vocab():
        raise ConfigError(
            f"{setting}: its vocabulary differs from {whose}'s; choose a policy with the same "
            "tokenizer"
        )
    logits, own = (
        len(weight_of(unwrapped(each.model).get_output_embeddings())) for each in (other, policy)
    )
    if logits != own:
        raise ConfigError(
            f"{setting}: it has {logits:,} logits, but {whose} has {own:,}; make them equal "
            "(resize_token_embeddings), or choose another model"
        )
    ours, theirs = (each.causal.tokenizer.chat_template for each in (policy, other))
    if chat and ours and theirs and ours != theirs:
        raise ConfigError(
            f"{setting}: its chat template differs from {whose}'s, so it expects other tokens; "
            "copy chat_template.jinja from one folder to the other, or give prompts as plain text"
        )


def of_model(config: LanguageConfig, model: str) -> LanguageConfig:
    """Return the job with ``actor.model`` replaced, without adapters and ``actor.init``."""
    lora = replace(config.actor.lora, r=0)
    return replace(config, actor=replace(config.actor, model=model, lora=lora, init=None))


def network_of_reference(run: Path, config: LanguageConfig) -> LanguageConfig:
    """Return ``config`` with the reference's network, if the reference is another run or model.

    The base model that both have in common is loaded from the folder that ``config`` names.
    """
    if not isinstance(config.reference, CheckpointReferenceConfig | ModelReferenceConfig):
        return config
    actor = typed_choice("actor", RunFolder(run).manifest["reference"])
    if actor.model == language_config(run).actor.model:
        actor = replace(actor, model=config.actor.model)
    return replace(config, actor=actor)


def _computing_as(other: LanguageConfig, config: LanguageConfig) -> LanguageConfig:
    """Return ``other`` at the precision of ``config``, if possible: both then round alike."""
    adapters_on_bfloat16 = other.actor.lora.r and other.actor.dtype == "bfloat16"
    if adapters_on_bfloat16 or other.actor.dtype == "float64":
        return other
    low = config.mixed or config.actor.dtype == "bfloat16"
    learner = replace(other.learner, dtype="mixed" if low else "float32")
    return replace(other, actor=replace(other.actor, dtype="float32"), learner=learner)


def language_config(run: Path, setting: str = "run") -> LanguageConfig:
    """Read the settings of a language run; refuse a control run."""
    config = stored_config(run)
    if not isinstance(config, LanguageConfig):
        raise ConfigError(f"{setting}={run}: this is a control run; give a language run")
    return config


#: Key prefix of the base model's digest; the dtype follows.
BASE = "base_sha256."
#: Key prefix of the critic's weights.
_HEAD = "value_head."


class BaseDigest:
    """SHA-256 of the base weights that a run starts from, for checkpoints without these weights.

    A digest in a checkpoint is compared with this one only if it is for the same dtype.

    It is that of the frozen weights of ``network``, a new causal LM, or of all if none is frozen.
    """

    def __init__(self, network: nn.Module, model: str | None) -> None:
        named = list(network.named_parameters())
        frozen = [(name, p) for name, p in named if not p.requires_grad] or named
        sha = hashlib.sha256()
        for name, parameter in frozen:
            sha.update(f"{name} {parameter.dtype} {tuple(parameter.shape)}".encode())
            sha.update(parameter.detach().cpu().reshape(-1).view(torch.uint8).numpy().data)
        self._model = model
        self._key = BASE + str(frozen[0][1].dtype).removeprefix("torch.")
        self.digest = torch.tensor(list(sha.digest()), dtype=torch.uint8)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the digest [32] under a key that names its dtype."""
        return {self._key: self.digest}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Raise a RuntimeError if the base model's weights differ from those of the run."""
        stored = state.get(self._key)
        if stored is not None and not torch.equal(stored.cpu(), self.digest):
            raise RuntimeError(
                f"actor.model={self._model or 'null'} no longer has the weights that the run "
                "started from; restore its original files"
            )


class Weights:
    """The weights that a checkpoint contains: by default all trained weights.

    ``whole``, for a reference: all parameters. ``base``: the digest of the base model's weights,
    saved with the state and compared on load.
    """

    def __init__(
        self,
        model: nn.Module,
        value_head: nn.Module | None = None,
        *,
        whole: bool = False,
        base: BaseDigest | None = None,
    ) -> None:
        named = list(model.named_parameters())  # lists tied weights once
        self._parameters = {n: p for n, p in named if whole or p.requires_grad}
        if value_head is not None:
            self._parameters |= {_HEAD + n: p for n, p in value_head.named_parameters()}
        self._base = base

    def state_dict(self) -> dict[str, Tensor]:
        """Return name -> weight, and the digest of the base model, if there is one."""
        base = {} if self._base is None else self._base.state_dict()
        return {name: p.detach() for name, p in self._parameters.items()} | base

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load weights, in place.

        Raises:
            RuntimeError: names or shapes differ, or the base model is a different one. A value head
                may be missing or superfluous, since not every run has a critic.
        """
        if self._base is not None:
            self._base.load_state_dict(state)
        stored = {name: v for name, v in state.items() if not name.startswith(BASE)}
        unmatched = sorted(stored.keys() ^ self._parameters.keys())
        if unmatched := [name for name in unmatched if not name.startswith(_HEAD)]:
            raise RuntimeError(
                f"its weights have different names ({unmatched[0]}, ...); set actor.* as in its run"
            )
        for name in stored.keys() & self._parameters.keys():
            parameter = self._parameters[name]
            if parameter.shape != stored[name].shape:
                shapes = f"{tuple(stored[name].shape)}, here {tuple(parameter.shape)}"
                raise RuntimeError(f"its {name} has shape {shapes}; set actor.* as in its run")
            parameter.copy_(stored[name])


def relocated(config: LanguageConfig, model: str | None) -> LanguageConfig:
    """Return the job with the folder ``model`` as its base model, or unchanged if it is None."""
    if model is None:
        return config
    if not expanded(model).is_dir():
        raise ConfigError(
            f"--model={model}: no such folder; give the folder of the run's base model"
        )
    return with_model(config, model)


def with_model(config: LanguageConfig, model: str | None) -> LanguageConfig:
    """Return the job with ``actor.model`` replaced."""
    return replace(config, actor=replace(config.actor, model=model))


def check_base(config: LanguageConfig, remedy: str = "--model FOLDER") -> None:
    """Refuse a stored run whose base model is missing; ``remedy`` gives the model's new folder."""
    model = config.actor.model
    if model is None or model == smollm.NAME:
        return
    try:
        find_model(model)
    except ConfigError as error:
        found, _, _ = str(error).rpartition(";")  # find_model's remedy is for new runs
        raise ConfigError(f"{found}; give its current folder with {remedy}") from error
