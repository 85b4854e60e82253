"""Looks up reward functions by name, calls them on a batch, and checks their scores.

A reward function takes B prompts, B responses and B rows, and returns B numbers::

    def reward(prompts, responses, rows):
        return [float(row["answer"] in text) for text, row in zip(responses, rows)]

- prompts: as in the data, texts or lists of {"role", "content"};
- responses: texts, without the EOS that ended them;
- rows: one mapping per response, with all fields of its prompt's row or generated problem.

All three are copies, which the function may change.

A reward function may also have any of the parameters in :data:`EXTRAS`, which klrl passes by name.
A function with ``**kwargs`` gets all of them. A function with a parameter ``completions`` is called
as TRL calls it. The functions in :data:`BUILT_IN` are reward
functions, and so is a :class:`~klrl.language.data.reward_model.RewardModel`. If a reward function
fails, klrl raises a :class:`~klrl.base.errors.RewardError` that names the sample, if possible.
"""

from __future__ import annotations

import inspect
import math
import time
from asyncio import CancelledError
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from klrl.base.errors import FAULTS, ConfigError, RewardError, in_one_line, with_line
from klrl.base.imports import import_named, named_in
from klrl.base.time_limit import TookTooLong, within
from klrl.config.own.parts import is_reward_model
from klrl.language.data import instructions, sort_digits
from klrl.language.data.prompts import Prompt, Tokenizer, guarded

#: (prompts, responses, rows, and requested extras by name) -> B scores.
RewardFunction: TypeAlias = Callable[..., object]


@dataclass(frozen=True)
class Extras:
    """Data on B responses, in addition to their texts.

    ``truncated``: the response was cut off at ``collector.max_new_tokens``. Ids exclude padding;
    the ids of a response include its EOS.
    """

    truncated: Sequence[bool]
    prompt_ids: Sequence[list[int]]
    response_ids: Sequence[list[int]]
    device: torch.device = torch.device("cpu")

    @property
    def lengths(self) -> list[int]:
        """The number of tokens of each response, the EOS included."""
        return [len(ids) for ids in self.response_ids]

    def __getitem__(self, index: int) -> Extras:
        """Return the data of one response."""
        at = slice(index, index + 1)
        return Extras(self.truncated[at], self.prompt_ids[at], self.response_ids[at], self.device)


#: Extra parameters that a reward function may have: attributes of :class:`Extras`.
EXTRAS = ("truncated", "lengths", "prompt_ids", "response_ids", "device")
BUILT_IN: Mapping[str, RewardFunction] = {
    "exact": sort_digits.exact,
    "proxy": sort_digits.proxy,
    "followed": instructions.followed,
    "followed_share": instructions.followed_share,
}


FAILURES = (*FAULTS, CancelledError)
#: The largest absolute value of a reward.
LARGEST = torch.finfo(torch.float32).max


def find_reward(name: str) -> RewardFunction:
    """Return the reward function that ``env.reward`` names.

    A name is a built-in, ``package.module:NAME``, ``FILE.py:NAME`` or ``model:FOLDER``. Modules are
    searched for on Python's path, then in the current folder.

    Raises:
        ConfigError: the module or function is missing, its import fails, or its parameters are
            wrong; or the folder has no sequence classifier with one label.
    """
    if name in BUILT_IN:
        return BUILT_IN[name]
    setting = f"env.reward={name}"
    module_name, colon, attribute = name.partition(":")
    if not (module_name and colon and attribute):
        *names, last = BUILT_IN
        raise ConfigError(
            f"{setting}: choose {', '.join(names)} or {last}, or name a function as "
            "package.module:NAME or path/file.py:NAME, or a classifier as model:FOLDER"
        )
    if is_reward_model(module_name, attribute):
        from klrl.language.data.reward_model import RewardModel

        return RewardModel(attribute, setting)
    function = named_in(setting, import_named(setting, module_name), module_name, attribute)
    if "completions" in _parameters(function):
        return _of_trl(function)
    try:
        inspect.signature(function).bind([], [], [], **dict.fromkeys(requested_extras(function)))
    except TypeError as error:
        raise ConfigError(
            f"{setting}: cannot be called as {attribute}(prompts, responses, rows) ({error}); give "
            f"it these three arguments; it may also have {', '.join(EXTRAS)}"
        ) from error
    except ValueError:
        pass  # some functions written in C have no signature
    return function


def _parameters(function: RewardFunction) -> Mapping[str, inspect.Parameter]:
    """Return a function's parameters by name; some functions written in C declare none."""
    try:
        return inspect.signature(function).parameters
    except ValueError:
        return {}


def _of_trl(function: RewardFunction) -> RewardFunction:
    """Adapt a reward function of TRL: (completions, **columns), each a list with B items.

    A function may name ``prompts``, ``completion_ids`` (with EOS) and fields of the rows; with
    ``**kwargs`` it gets all. Completions of conversations are conversations of one turn.
    """
    parameters = _parameters(function)
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())

    def reward(
        prompts: Sequence[Any],
        responses: Sequence[str],
        rows: Sequence[Mapping[str, Any]],
        response_ids: Sequence[list[int]] = (),
    ) -> object:
        turns = [[{"role": "assistant", "content": text}] for text in responses]
        chat = len(prompts) > 0 and not isinstance(prompts[0], str)
        columns = {name: [row.get(name) for row in rows] for name in {n for r in rows for n in r}}
        given = columns | {"prompts": prompts, "completion_ids": response_ids}
        given["completions"] = turns if chat else responses
        return function(**{n: v for n, v in given.items() if takes_all or n in parameters})

    return reward


def requested_extras(function: RewardFunction) -> tuple[str, ...]:
    """Return the :data:`EXTRAS` that a reward function requests by the names of its parameters."""
    parameters = list(_parameters(function).values())
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return EXTRAS
    by_name = {
        p.name for p in parameters[3:] if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    }
    return tuple(name for name in EXTRAS if name in by_name)


class _Raised(Exception):
    """A reward function raised an error; the arguments are its text, without and with its line."""


class Reward:
    """A reward function with a name, a time limit and checks of its scores.

    With a time limit, the function runs in a separate thread while the caller waits. The caller can
    then abandon a call that hangs in C code, and Ctrl-C keeps working; a time limit by an alarm
    signal would allow neither. The thread of an abandoned call ends with the process. A function
    that itself uses alarm signals needs the main thread: give ``timeout=None``.

    Args:
        name: the reward's name in ``env.reward``.
        timeout: seconds that a call may take; None for no limit.
        function: the function to call; default: the one that ``name`` names.
        abstains: whether the function may return None for a sample; its score is then NaN.
    """

    def __init__(
        self,
        name: str,
        timeout: float | None,
        function: RewardFunction | None = None,
        *,
        abstains: bool = False,
    ) -> None:
        self._name, self._timeout, self._abstains = name, timeout, abstains
        self._function = function or find_reward(name)
        self._extras = requested_extras(self._function)

    def prepare(self, chat: bool = False) -> None:
        """Call :meth:`RewardModel.prepare`, if the function is a reward model."""
        prepare = getattr(self._function, "prepare", None)
        if prepare is not None:
            prepare(chat)

    def __call__(
        self, prompts: Sequence[Prompt], responses: Sequence[str], extras: Extras | None = None
    ) -> Tensor:
        """Score B responses, each to its prompt: [B] float32 on the CPU, finite but for None."""
        try:
            returned = self._call(prompts, responses, extras)
        except (_Raised, TookTooLong) as error:
            raise RewardError(self._failure(prompts, responses, extras, error)) from error
        return self._checked(prompts, responses, returned)

    def _call(
        self, prompts: Sequence[Prompt], responses: Sequence[str], extras: Extras | None
    ) -> object:
        """Return scores, with texts for wrong ones; the limit includes all code of the user."""
        names = () if extras is None else self._extras

        def call() -> object:
            try:
                # Copies, so that a function's changes do not reach the data of later iterations.
                contents = [deepcopy(prompt.content) for prompt in prompts]
                rows = [deepcopy(prompt.row) for prompt in prompts]
                requested = {name: deepcopy(getattr(extras, name)) for name in names}
                returned = self._function(contents, list(responses), rows, **requested)
                scores = _listed(returned)
                if type(scores) is not list or len(scores) != len(responses):
                    return scores
                return [math.nan if x is None and self._abstains else _number(x) for x in scores]
            except FAILURES as error:
                raise _Raised(in_one_line(error), with_line(error)) from error

        return within(self._timeout, call)

    def _failure(
        self,
        prompts: Sequence[Prompt],
        responses: Sequence[str],
        extras: Extras | None,
        error: Exception,
    ) -> str:
        """Describe a failed batch in one line; name the first sample that also fails alone."""
        failed = f"env.reward={self._name}: {self._describe(error)} on {len(responses)} samples"
        end = time.monotonic() + (self._timeout or 10.0)
        for i in range(len(responses)):
            if time.monotonic() > end:
                return failed
            try:
                self._call(prompts[i : i + 1], responses[i : i + 1], extras and extras[i])
            except (_Raised, TookTooLong) as alone:
                reason = self._describe(alone, with_line=True)
                if isinstance(alone, TookTooLong):
                    reason = f"{self._describe(error)} on the batch; hangs on this sample alone"
                return f"{self.sample(i, prompts, responses)}: {reason}"
        return f"{failed} in one batch; each sample alone succeeds"

    def _describe(self, error: Exception, with_line: bool = False) -> str:
        if isinstance(error, TookTooLong):
            return f"took more than {self._timeout:g} s"
        text = str(error.args[with_line])
        if self._timeout is not None and "main thread" in text:
            # The error of a function that sets a signal handler outside the main thread.
            text += "; env.reward_timeout=null calls it on the main thread"
        return f"raised {text}"

    def _checked(
        self, prompts: Sequence[Prompt], responses: Sequence[str], returned: object
    ) -> Tensor:
        size = len(responses)
        if type(returned) is not list:
            raise RewardError(
                f"env.reward={self._name}: returned {type(returned).__name__}, not a list of "
                f"{size} numbers"
            )
        if len(returned) != size:
            raise RewardError(
                f"env.reward={self._name}: returned {len(returned)} scores for {size} samples"
            )
        for i, value in enumerate(returned):
            if isinstance(value, str):
                raise RewardError(f"{self.sample(i, prompts, responses)}: returned {value}")
        return torch.tensor(returned, dtype=torch.float32)

    def sample(self, index: int, prompts: Sequence[Prompt], responses: Sequence[str]) -> str:
        """Name the function and a sample, for messages."""
        shown = responses[index]
        shown = shown if len(shown) <= 60 else shown[:57] + "..."
        return (
            f"env.reward={self._name}: sample {index} of {len(responses)} "
            f"({prompts[index].origin}, response {shown!r})"
        )


def _listed(returned: object) -> object:
    """List a function's return value, if it has items that may be scores."""
    if isinstance(returned, Tensor):
        returned = returned.detach().cpu()
    if isinstance(returned, str | bytes | Mapping | Set) or not isinstance(returned, Iterable):
        return returned
    try:
        return list(returned)
    except TypeError:  # a tensor without dimensions
        return returned


def _number(value: Any) -> float | str:
    """Convert a score to float; return a text if float32 cannot hold it."""
    try:
        # float() would parse the text "0.5" too.
        score = None if isinstance(value, str | bytes) else float(value)
    except OverflowError:  # of an int
        return "an int, too large for float32"
    except (TypeError, ValueError):
        score = None
    if score is None:
        return f"{value!r:.40}, not a number"
    if not math.isfinite(score):
        return f"{score:g}"
    return score if abs(score) <= LARGEST else f"{score:g}, too large for float32"


def response_texts(
    tokenizer: Tokenizer, rows: Sequence[list[int]], eos: Collection[int]
) -> list[str]:
    """Decode B responses for a reward function, without padding and final EOS.

    Special tokens inside a response stay in its text, so that the reward can depend on them.
    """
    ended = [row[:-1] if row and row[-1] in eos else row for row in rows]
    decode = partial(tokenizer.decode, skip_special_tokens=False)
    what = "actor.model: its tokenizer cannot decode a response"
    return guarded(decode, ended, lambda _: what, "fix its files")
