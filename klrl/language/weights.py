"""The weights of a language model in a checkpoint, and the check that they fit their base model."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

#: Prefix, before the dtype, of the entry that identifies the base model.
_BASE = "base_sha256."


@dataclass(frozen=True)
class BaseDigest:
    """A digest of the weights that a run started from and that its checkpoint does not hold.

    Attributes:
        model: ``actor.model``, from which they were loaded.
        dtype: in which they were loaded; digests of two dtypes cannot be compared.
        digest: [32] uint8, SHA-256.
    """

    model: str | None
    dtype: str
    digest: Tensor


def base_digest(network: nn.Module, model: str | None) -> BaseDigest:
    """The digest of a newly loaded network: of its frozen weights, or of all if none is frozen.

    Args:
        network: a causal LM; LoRA adapters are not part of the base.
        model: ``actor.model``.
    """
    named = list(network.named_parameters())
    frozen = [(name, p) for name, p in named if not p.requires_grad] or named
    sha = hashlib.sha256()
    for name, parameter in frozen:
        sha.update(f"{name} {parameter.dtype} {tuple(parameter.shape)}".encode())
        sha.update(parameter.detach().cpu().reshape(-1).view(torch.uint8).numpy().data)
    dtype = str(frozen[0][1].dtype).removeprefix("torch.")
    return BaseDigest(model, dtype, torch.tensor(list(sha.digest()), dtype=torch.uint8))


class Weights:
    """The part of a model that a checkpoint holds: trained weights, with LoRA the adapters alone.

    Args:
        model: a causal LM.
        value_head: the critic, if there is one.
        whole: hold every parameter, trained or not, as for a reference.
        base: digest of the weights that are not held; saved with them and compared.
    """

    def __init__(
        self,
        model: nn.Module,
        value_head: nn.Module | None = None,
        *,
        whole: bool = False,
        base: BaseDigest | None = None,
    ) -> None:
        named = list(model.named_parameters())  # tied weights once
        self._parameters = {n: p for n, p in named if whole or p.requires_grad}
        if value_head is not None:
            self._parameters |= {f"value_head.{n}": p for n, p in value_head.named_parameters()}
        self._base = base

    def state_dict(self) -> dict[str, Tensor]:
        """Name -> weight; and the digest of the base model, if there is one."""
        state = {name: p.detach() for name, p in self._parameters.items()}
        if self._base is not None:
            state[_BASE + self._base.dtype] = self._base.digest
        return state

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load weights, in place.

        Raises:
            RuntimeError: other names or shapes, or adapters of another base model. A value head may
                be missing or superfluous: a run with another advantage starts without its own.
        """
        self._check_base(state)
        state = {n: v for n, v in state.items() if not n.startswith(_BASE)}
        parameters = {n: p for n, p in self._parameters.items() if n in state or not _of_head(n)}
        stored = {n: v for n, v in state.items() if n in parameters or not _of_head(n)}
        if unmatched := sorted(set(parameters) ^ set(stored)):
            raise RuntimeError(
                f"its weights have other names ({unmatched[0]}, ...); choose the same actor.*"
            )
        for name, parameter in parameters.items():
            if parameter.shape != stored[name].shape:
                shapes = f"{tuple(stored[name].shape)}, here {tuple(parameter.shape)}"
                raise RuntimeError(f"its {name} is {shapes}; choose the same actor.*")
            parameter.copy_(stored[name])

    def _check_base(self, state: Mapping[str, Tensor]) -> None:
        if self._base is None:
            return
        stored = state.get(_BASE + self._base.dtype)
        if stored is not None and not torch.equal(stored.cpu(), self._base.digest):
            raise RuntimeError(
                f"actor.model={self._base.model or 'null'} does not hold the weights that the run "
                "started from; put those files back"
            )


def _of_head(name: str) -> bool:
    return name.startswith("value_head.")
