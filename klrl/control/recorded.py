"""``klrl record RUN``: episodes of a control policy as a memory-mapped TensorDict of frames [F].

The layout of TorchRL's data sets: ``observation, action, done, terminated, truncated, episode`` and
``("next", ...)``; for ``tanh_normal`` also ``pre_tanh``. ``demonstrations.py`` reads it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from tensordict import TensorDict

from klrl.config import Config
from klrl.control.acting import Acting, Array, make_acting
from klrl.control.copies import VectorGymEnv
from klrl.control.evaluate import waves
from klrl.control.load import trained_agent
from klrl.domains import CONTROL
from klrl.train.evaluate import Evaluation, Scores, Starts, evaluation
from klrl.train.schedule import Size


class _Taped:
    """Act by a wrapped policy; keep its samples, and the results of each step."""

    def __init__(self, acting: Acting) -> None:
        self.begin, self.action, self._sample = acting.begin, acting.action, acting.sample
        self._steps: list[tuple[Array, Array]] = []
        self._after: list[tuple[Array, ...]] = []

    def sample(self, step: int, observation: Array) -> Array:
        """The wrapped policy's sample at observations [N, D]."""
        sample = self._sample(step, observation)
        self._steps.append((observation.copy(), sample.copy()))
        return sample

    def watch(self, env: VectorGymEnv) -> None:
        """Keep the results of the step that was just taken (at first: of the reset)."""
        self._after.append(tuple(each.copy() for each in env.answers))

    def frames(self, copy: int, steps: int, sample_key: str) -> TensorDict | None:
        """The frames of an episode; None if it did not end."""
        seen, samples = (
            np.stack([step[part][copy] for step in self._steps[:steps]]) for part in (0, 1)
        )
        results = zip(*self._after[1 : steps + 1], strict=True)
        after, reward, terminated, truncated = (
            np.stack([x[copy] for x in part]) for part in results
        )
        if not (terminated[-1] or truncated[-1]):
            return None
        flags = {"terminated": terminated, "truncated": truncated, "done": terminated | truncated}
        ends = {key: torch.from_numpy(each).unsqueeze(1) for key, each in flags.items()}
        root = {
            "observation": torch.from_numpy(seen),
            "action": torch.from_numpy(self.action(samples)),
            sample_key: torch.from_numpy(samples),
            **{key: torch.zeros_like(each) for key, each in ends.items()},
            "next": {
                "observation": torch.from_numpy(after.astype(seen.dtype)),
                "reward": torch.from_numpy(reward.astype(np.float32)).unsqueeze(1),
                **ends,
            },
        }
        return TensorDict(root, [steps])


def record_trained(
    run: Path,
    config: Config,
    *,
    into: Path,
    starts: Starts,
    size: Size,
    sampled: bool,
    which: str,
    device: torch.device,
) -> Evaluation:
    """Write the episodes that ended, if any did; returns their evaluation."""
    agent, episodes = trained_agent(run, which, str(device)), list[TensorDict]()

    def played() -> Iterator[Scores]:
        how = (config.env, starts, size, sampled, _Taped.watch)
        for tape, scores, steps in waves(lambda: _Taped(make_acting(agent, device)), *how):
            for copy, count in enumerate(steps):
                if (frames := tape.frames(copy, count, agent.family.sample_key)) is not None:
                    episodes.append(frames.set("episode", torch.full((count,), len(episodes))))
            yield scores

    how = "sampled" if sampled else "deterministic"
    result = evaluation(played(), CONTROL, how, starts)
    if episodes:
        TensorDict.cat(episodes).memmap(into)
    return result
