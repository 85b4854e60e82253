"""Reward functions: looked up by name, called on a batch, and checked.

A reward function takes B prompts, B responses and B rows, and returns B numbers::

    def reward(prompts, responses, rows):
        return [float(row["answer"] in text) for text, row in zip(responses, rows)]

- prompts: as the data has them, texts or lists of {"role", "content"};
- responses: texts, without the EOS that ended them;
- rows: all fields of the data file's lines, or a task's own fields.

The built-in ``exact`` and ``proxy`` are such functions. Any failure of a reward function becomes a
:class:`~klrl.base.errors.RewardError` of one line that names the sample.
"""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from typing import Any, TypeAlias

import torch
from torch import Tensor

from klrl.base.errors import ConfigError, RewardError, in_one_line
from klrl.base.imports import import_users
from klrl.base.time_limit import TookTooLong, within
from klrl.language import sort_digits
from klrl.language.prompts import Prompt, Tokenizer

#: (prompts, responses, rows) -> scores, B of each.
RewardFunction: TypeAlias = Callable[
    [Sequence[Any], Sequence[str], Sequence[Mapping[str, Any]]], Any
]
#: A prompt and a response to it.
Sample: TypeAlias = tuple[Prompt, str]
BUILT_IN: Mapping[str, RewardFunction] = {
    "exact": sort_digits.exact,
    "proxy": sort_digits.proxy,
}


#: Failures of a user's function. Ctrl-C is none of them; a call of exit is one.
FAILURES = (Exception, SystemExit)


def find_reward(name: str) -> RewardFunction:
    """``env.reward``: a built-in, or a function of the user's as ``package.module:function``.

    Modules are searched for on Python's path, then in the current folder.

    Raises:
        ConfigError: no such module or function, an import that fails, or other arguments.
    """
    if name in BUILT_IN:
        return BUILT_IN[name]
    setting = f"env.reward={name}"
    module_name, colon, attribute = name.partition(":")
    if not (module_name and colon and attribute):
        raise ConfigError(
            f"{setting}: choose {' or '.join(BUILT_IN)}, or name a function as "
            "package.module:function"
        )
    module = import_users(setting, module_name)
    function = getattr(module, attribute, None)
    if not callable(function):
        raise ConfigError(f"{setting}: {module_name} has no function {attribute}; fix the name")
    try:
        inspect.signature(function).bind([], [], [])
    except TypeError as error:
        raise ConfigError(
            f"{setting}: cannot be called as {attribute}(prompts, responses, rows) ({error}); give "
            "it these three arguments"
        ) from error
    except ValueError:
        pass  # some functions written in C have no signature
    return function


class Reward:
    """A reward function with a name, a time limit and checks of what it returns.

    With a time limit the function runs in its own thread while the caller waits: a hang in C code
    can be abandoned, and Ctrl-C keeps working. An alarm signal would allow neither, works only on
    the main thread, and is used by some verifiers themselves. Such verifiers need the main thread:
    ``timeout=None`` calls the function in the caller's thread, without a limit. A function that
    hangs cannot be ended; its thread dies with the process.

    Args:
        name: ``env.reward``.
        timeout: seconds that a call may take; None for no limit.
        function: default: the function that ``name`` names.

    Raises:
        ConfigError: see :func:`find_reward`.
    """

    def __init__(
        self, name: str, timeout: float | None, function: RewardFunction | None = None
    ) -> None:
        self._name, self._timeout = name, timeout
        self._function = function or find_reward(name)

    def __call__(self, prompts: Sequence[Prompt], responses: Sequence[str]) -> Tensor:
        """Score B responses.

        Args:
            prompts: B prompts, one per response.
            responses: B texts.

        Returns:
            [B] float32 on the CPU, all finite.

        Raises:
            RewardError: the function raised, took too long, or did not return B finite numbers.
        """
        samples = list(zip(prompts, responses, strict=True))
        try:
            returned = self._call(samples, self._timeout)
        except FAILURES as error:
            raise RewardError(self._failure_message(samples, error)) from error
        return self._checked(samples, returned)

    def _call(self, samples: Sequence[Sample], timeout: float | None) -> Any:
        prompts = [prompt.content for prompt, _ in samples]
        responses = [response for _, response in samples]
        rows = [prompt.row for prompt, _ in samples]
        return within(timeout, lambda: self._function(prompts, responses, rows))

    def _failure_message(self, samples: Sequence[Sample], error: BaseException) -> str:
        """One line about a batch that failed; names the sample that fails alone, if one does."""
        failed = f"{self._describe(error)} on {len(samples)} samples"
        first = self._first_to_fail(samples)
        if first is None:
            return f"env.reward={self._name}: {failed}, on none of them alone"
        index, failure = first
        if failure is None:
            return f"env.reward={self._name}: {failed}"
        sample = self._describe_sample(index, samples)
        if isinstance(failure, TookTooLong):
            return f"{sample}: {self._describe(error)}, and hangs on this one alone"
        return f"{sample}: {self._describe(failure)}"

    def _first_to_fail(self, samples: Sequence[Sample]) -> tuple[int, BaseException | None] | None:
        """Search for a sample that fails alone, for the time of one or two calls.

        Returns:
            Its index and its error; an index and None if the time ran out first; None if every
            sample passes alone.
        """
        end = time.monotonic() + (self._timeout or 10.0)
        for index, sample in enumerate(samples):
            if time.monotonic() > end:
                return index, None
            try:
                self._call([sample], self._timeout)
            except FAILURES as error:
                return index, error
        return None

    def _describe(self, error: BaseException) -> str:
        if isinstance(error, TookTooLong):
            return f"took more than {self._timeout:g} s"
        hint = ""
        if self._timeout is not None and "main thread" in str(error):
            # The error of a function that sets signals.
            hint = "; without a time limit it is called on the main thread"
        return f"raised {in_one_line(error)}{hint}"

    def _checked(self, samples: Sequence[Sample], returned: Any) -> Tensor:
        size = len(samples)
        if isinstance(returned, Tensor):
            returned = returned.detach().cpu()  # from a reward model
        if isinstance(returned, str | bytes | Mapping | Set) or not _has_length(returned):
            raise RewardError(
                f"env.reward={self._name}: returned {type(returned).__name__}, not a list of "
                f"{size} numbers"
            )
        if len(returned) != size:
            raise RewardError(
                f"env.reward={self._name}: returned {len(returned)} scores for {size} samples"
            )
        scores = []
        for index, value in enumerate(returned):
            try:
                scores.append(float(value))
            except (TypeError, ValueError):
                raise RewardError(
                    f"{self._describe_sample(index, samples)}: returned {value!r:.40}, not a number"
                ) from None
            if not math.isfinite(scores[-1]):
                raise RewardError(f"{self._describe_sample(index, samples)}: returned {scores[-1]}")
        return torch.tensor(scores, dtype=torch.float32)

    def _describe_sample(self, index: int, samples: Sequence[Sample]) -> str:
        prompt, response = samples[index]
        shown = response if len(response) <= 60 else response[:57] + "..."
        return (
            f"env.reward={self._name}: sample {index} of {len(samples)} "
            f"({prompt.origin}, response {shown!r})"
        )


def _has_length(value: Any) -> bool:
    """Whether ``len`` works; a tensor without dimensions has ``__len__`` but no length."""
    try:
        len(value)
    except TypeError:
        return False
    return True


def response_texts(
    tokenizer: Tokenizer, ids: Tensor, mask: Tensor, eos: Collection[int]
) -> list[str]:
    """Decode responses for a reward function.

    Special tokens inside stay in the text, so that a policy cannot hide them from the reward.

    Args:
        tokenizer: of the policy.
        ids: [B, R], right-padded.
        mask: [B, R] bool, True at the response's tokens, its EOS included.
        eos: ids that end a response.

    Returns:
        B texts without the EOS that ended them.
    """
    rows = [row[kept].tolist() for row, kept in zip(ids, mask, strict=True)]
    rows = [row[:-1] if row and row[-1] in eos else row for row in rows]
    return list(tokenizer.batch_decode(rows, skip_special_tokens=False))
