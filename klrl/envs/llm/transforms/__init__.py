"""Exports the names of :mod:`klrl.envs.llm.transforms.kl`, as TorchRL does."""

from klrl.envs.llm.transforms import kl

__all__ = kl.__all__


def __getattr__(name: str) -> object:
    return getattr(kl, name)
