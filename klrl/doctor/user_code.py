"""Code of the user's for ``klrl doctor --loss``: found by its name, its errors in one line."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from klrl.base.errors import ConfigError, LossError, with_line
from klrl.base.imports import import_named, named_in
from klrl.doctor.problems import DOUBLE, MakeNetwork


def load(option: str, name: str) -> Any:
    """What ``package.module:name`` or ``path/file.py:name``, given by an option, names."""
    setting = f"{option} {name}"
    source, _, wanted = name.rpartition(":")
    if not source or not wanted:
        raise ConfigError(f"{setting}: write package.module:NAME or path/file.py:NAME")
    return named_in(setting, import_named(setting, source), source, wanted)


def make_network(name: str, make: Callable[..., Any]) -> MakeNetwork:
    """``--actor``: the user's function (observations, actions) -> network, checked.

    Its logits are [..., actions], have a gradient, and are the same at each call.
    """
    setting = f"--actor {name}"

    def checked(observations: int, actions: int) -> nn.Module:
        with in_one_line(setting):
            network = make(observations, actions)
        if not isinstance(network, nn.Module):
            raise ConfigError(
                f"{setting}: returned {type(network).__name__}; return a network (nn.Module) from "
                "observations [..., observations] to logits [..., actions]"
            )
        eye, told = torch.eye(observations, dtype=DOUBLE), ""
        with in_one_line(setting):
            network = deepcopy(network).to(DOUBLE)  # policy and reference may be given the same
            logits, again = network(eye), network(eye)
        shape = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        if shape != (observations, actions):
            told = f"gave {shape} for observations {tuple(eye.shape)}; give logits "
            told += f"{(observations, actions)}"
        elif not logits.requires_grad:
            told = "its logits have no gradient; remove detach or no_grad"
        elif not torch.equal(logits, again):
            told = "two calls give different logits; leave dropout and noise out"
        if told:
            raise ConfigError(f"{setting}: {told}")
        return network

    return checked


def settings_of(words: list[str]) -> dict[str, object]:
    """``NAME=VALUE`` as keywords; a value is a Python literal, true, false, null, or a text."""
    values = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not (equals and name.isidentifier()):
            raise ConfigError(f"{word}: write NAME=VALUE, a keyword of the loss")
        constants = {"true": True, "false": False, "null": None}
        try:
            values[name] = constants[text] if text in constants else ast.literal_eval(text)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            values[name] = text  # all that literal_eval may raise
    return values


@contextmanager
def in_one_line(setting: str) -> Iterator[None]:
    """Raise what the user's code raises as one line with the place."""
    try:
        yield
    except (Exception, SystemExit) as error:
        raise LossError(f"{setting}: raised {with_line(error)}") from error
