"""Demonstrations as frames [F] in TorchRL's memory-mapped format: learned from, and recorded.

As TorchRL's data sets, ``TensorDict.memmap`` and ``ReplayBuffer.dumps`` write them:

| key | shape | if it is missing |
|---|---|---|
| observation, action | [F, D], [F, A] or [F] | refused; discrete actions are numbers or one-hot |
| episode, ("next", "done") | [F], [F, 1] | the other one ends episodes; without both, one episode |
| ("next", "terminated") | [F, 1] | no episode terminates: all are cut off |
| ("next", "reward") | [F, 1] | refused, unless loss.critic_coeff=0 |
| ("next", "observation") | [F, D] | the next frame's; at an episode's end its own |
| pre_tanh | [F, A] | of ``tanh_normal``: the inverse of the action, at most 7.25 in size |
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.data import MultiCategorical

from klrl.base.errors import ConfigError, first_line
from klrl.base.files import expanded
from klrl.base.seeds import derived_seed
from klrl.config import Config, DemonstrationsConfig
from klrl.control.actor import Agent
from klrl.control.copies import VectorGymEnv
from klrl.control.distributions import Categorical, Family, TanhNormalFamily
from klrl.control.env import make_env
from klrl.control.evaluate import MAX_COPIES, MAX_STEPS
from klrl.control.load import trained_agent
from klrl.control.vector import VectorRollout, add_policy
from klrl.domains import CONTROL
from klrl.runs.metrics import Row
from klrl.train.evaluate import Evaluation, Scores, Starts, evaluation
from klrl.train.schedule import Size

Key = str | tuple[str, ...]
#: Numbers above it overflow in a log-likelihood.
LARGEST = 1e15


class Demonstrations:
    """``collector=demonstrations``: pieces of consecutive frames, shuffled; episodes are held out.

    Rollout i depends on data, seed and i alone, so a checkpoint holds only a digest of the data.
    """

    iteration = 0  # of the next rollout
    begin: Callable[[], None]  # called before each rollout, whose rows continue no earlier ones

    def __init__(self, config: Config, agent: Agent, env: VectorGymEnv) -> None:
        assert isinstance(config.collector, DemonstrationsConfig)
        steps, share = config.collector.steps, config.collector.held_out
        folder, self._agent = _Folder(config.collector.data), agent
        self._shape, self._seed = (config.env.num_envs, steps), derived_seed(config.seed, "data")
        self._folder, self._digest = folder, folder.digest()
        if config.loss.critic_coeff and folder.get(("next", "reward")) is None:
            raise folder.error("holds no next.reward for the critic; set loss.critic_coeff=0")
        frames = _frames(folder, env, agent.family)
        ends = frames["next", "done"].flatten()
        episodes = int(ends.sum())
        if share and episodes < 2:
            raise ConfigError(
                f"collector.held_out={share:g}: {folder.setting} holds one episode; give more, or 0"
            )
        # At random, but equally for every seed.
        count = min(max(round(share * episodes), 1), episodes - 1) if share else 0
        held = torch.from_numpy(np.random.default_rng(0).permutation(episodes)[:count])
        out = torch.isin(ends.cumsum(0) - ends.long(), held)
        self._frames, self._held = frames[~out], frames[out]
        if len(self._frames) < steps:
            raise ConfigError(
                f"collector.steps={steps}: {folder.setting} has {len(self._frames)} frames to "
                "learn from; choose fewer"
            )
        self.note = f"{folder.setting}: {episodes} episodes, {len(frames):,} frames, "
        self.note += f"{len(self._held):,} of them held out"

    @property
    def observations(self) -> Tensor:
        """All observations to learn from, [F, D]."""
        return self._frames["observation"]

    @torch.no_grad()
    def collect(self) -> TensorDictBase:
        """The next rollout [N, T], with parameters and log-probs of the current policy.

        A pass over the frames cuts them at a random offset into pieces, and shuffles these; the
        frames are a circle, since its two ends are ends of episodes.
        """
        self.begin()
        (rows, steps), total = self._shape, len(self._frames)
        starts = np.empty(rows, np.int64)
        for row in range(rows):
            epoch, place = divmod(self.iteration * rows + row, total // steps)
            rng = np.random.default_rng((self._seed, epoch))
            starts[row] = rng.integers(total) + rng.permutation(total // steps)[place] * steps
        self.iteration += 1
        index = torch.from_numpy((starts[:, None] + np.arange(steps)) % total)
        batch: TensorDict = self._frames[index].to(next(self._agent.actor.parameters()).device)
        batch.names = [None, "time"]
        add_policy(self._agent, batch)
        return batch

    @torch.no_grad()
    def held_out(self) -> Row:
        """Negative log-likelihood of held-out frames, nats per frame: of a rollout's at most."""
        if not len(self._held):
            return {}
        few = self._held[:: -(-len(self._held) // (self._shape[0] * self._shape[1]))]
        few = few.to(next(self._agent.actor.parameters()).device)
        add_policy(self._agent, few)
        return {"nll/held_out": -float(few["action_log_prob"].double().mean())}

    def close(self) -> None:
        """Do nothing: nothing is open."""

    def state_dict(self) -> dict[str, object]:
        """The digest of the data."""
        return {"data": self._digest}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Refuse data other than those that the run began with."""
        if state.get("data") != self._digest:
            raise self._folder.error(
                "its frames have changed since the run began; restore them, or start a new run"
            )


# -------------------------------------------------------------------------------------- reading


class _Folder:
    """The frames of a folder [F], with an error for each entry that does not fit the task."""

    def __init__(self, path: str) -> None:
        folder, self.setting = expanded(path), f"data={path}"
        remedy = "give a folder that klrl record or TensorDict.memmap wrote"
        if not folder.is_dir():
            what = "is a file" if folder.exists() else "no such folder"
            raise self.error(f"{what}; {remedy}")
        if (folder / "storage").is_dir():  # ReplayBuffer.dumps
            folder /= "storage"
        try:
            self._require_whole(folder)
            data = TensorDict.load_memmap(folder)
            size = folder / "storage_metadata.json"
            if size.is_file():  # of a buffer, which may not be full
                data = data[: json.loads(size.read_text())["len"]]
        except ConfigError:
            raise
        except Exception as error:  # tensordict's have no common base
            raise self.error(f"cannot be read ({first_line(error)}); {remedy}") from error
        if data.ndim != 1 or not len(data):
            raise self.error(f"has the shape {list(data.shape)}; give frames [F]")
        self._data = data

    def _require_whole(self, folder: Path) -> None:
        """Refuse files that were cut: torch would fill them with zeros, on the disk too."""
        for meta in folder.rglob("meta.json"):
            for name, entry in json.loads(meta.read_text()).items():
                file = meta.parent / f"{name}.memmap"
                if isinstance(entry, dict) and "dtype" in entry and file.is_file():
                    item = getattr(torch, entry["dtype"].removeprefix("torch.")).itemsize
                    size, whole = file.stat().st_size, math.prod(entry["shape"]) * item
                    if size < whole:
                        text = f"{file.name} has {size:,} bytes, not {whole:,}; copy it again"
                        raise self.error(text)

    def error(self, text: str) -> ConfigError:
        return ConfigError(f"{self.setting}: {text}")

    def __len__(self) -> int:
        return len(self._data)

    def get(self, key: Key) -> Tensor | None:
        """An entry as numbers [F, W]; None if it is missing."""
        value: Tensor | None = self._data.get(key, None)
        return None if value is None else value.reshape(len(self), -1)

    def read(self, key: Key, width: int, dtype: torch.dtype) -> Tensor:
        """An entry as finite numbers [F, width]."""
        value, shown = self.get(key), key if isinstance(key, str) else ".".join(key)
        if value is None:
            raise self.error(f"holds no {shown}; give demonstrations of this task")
        if value.shape[1] != width:
            raise self.error(
                f"its {shown} has {value.shape[1]} numbers per frame, the task's has {width}; "
                "give demonstrations of this task"
            )
        if not (value.double().abs() <= LARGEST).all():
            raise self.error(f"its {shown} is not finite, or above {LARGEST:g}; drop such episodes")
        return value.to(dtype)

    def flag(self, name: str) -> Tensor:
        """``("next", name)`` as [F] bool; False if it is missing."""
        value = self.get(("next", name))
        return torch.zeros(len(self), dtype=torch.bool) if value is None else value[:, 0].bool()

    def digest(self) -> str:
        """SHA-256 over all entries."""
        sha = hashlib.sha256()
        for key, value in sorted(self._data.items(True, True), key=lambda item: str(item[0])):
            if isinstance(value, Tensor):
                sha.update(f"{key} {value.dtype} {value.shape}".encode())
                sha.update(value.contiguous().view(-1).view(torch.uint8).numpy().data)
        return sha.hexdigest()


def _frames(folder: _Folder, env: VectorGymEnv, family: Family) -> TensorDict:
    """Frames [F] with the keys of a rollout."""
    seen = env.observation_spec_unbatched["observation"]
    like = (seen.shape[-1], seen.dtype)
    observation, terminated = folder.read("observation", *like), folder.flag("terminated")
    ends = folder.flag("done") | terminated | folder.flag("truncated")
    if folder.get("episode") is not None:
        episode = folder.read("episode", 1, torch.float64)
        ends |= (episode != episode.roll(-1, 0)).any(1)
    ends[-1] = True
    after, reward = observation.roll(-1, 0), torch.zeros(len(folder), 1)
    after[ends] = observation[ends]
    if folder.get(("next", "observation")) is not None:
        after = folder.read(("next", "observation"), *like)
    if folder.get(("next", "reward")) is not None:
        reward = folder.read(("next", "reward"), 1, torch.float32)
    flags = {"done": ends, "terminated": terminated, "truncated": ends & ~terminated}
    root = {
        "observation": observation,
        **_actions(folder, env, family),
        **{key: torch.zeros_like(each)[:, None] for key, each in flags.items()},
        "next": {
            "observation": after,
            "reward": reward,
            **{key: each[:, None] for key, each in flags.items()},
        },
    }
    return TensorDict(root, [len(folder)])


def _actions(folder: _Folder, env: VectorGymEnv, family: Family) -> dict[str, Tensor]:
    """The action, and for ``tanh_normal`` its inverse."""
    spec: Any = env.action_spec_unbatched
    if "logits" in family.param_keys:
        return {"action": _choices(folder, spec, single=type(family) is Categorical)}
    action = folder.read("action", spec.shape[-1], torch.float32)
    if not isinstance(family, TanhNormalFamily):
        return {"action": action}
    unit = (action - family.low) / family.half_width.cpu() - 1  # -1 .. 1
    if (unit.abs() > 1 + 1e-5).any():
        raise folder.error(
            f"has the action {action.flatten()[unit.abs().argmax()]:g}, out of bounds, which "
            "actor=tanh_normal never leaves; choose actor=normal"
        )
    if folder.get("pre_tanh") is not None:
        inverse = folder.read("pre_tanh", spec.shape[-1], torch.float32)
    else:
        inverse = unit.double().clamp(-1 + 1e-6, 1 - 1e-6).atanh().float()
    return {"action": action, "pre_tanh": inverse}


def _choices(folder: _Folder, spec: Any, *, single: bool) -> Tensor:
    """Discrete actions as numbers from 0: [F], or [F, M] of a product."""
    counts = torch.as_tensor(getattr(spec, "nvec", spec.n)).reshape(-1)  # Binary has n = bits
    counts = counts if isinstance(spec, MultiCategorical) or single else torch.tensor([2])
    given = folder.get("action")
    if single and given is not None and given.shape[1] == int(counts) > 1:
        wrong = ((given != 0) & (given != 1)).any(1) | (given.sum(1) != 1)
        if wrong.any():
            raise folder.error(
                f"has the action {given[wrong][0].tolist()}, neither a number nor one-hot; give "
                "demonstrations of this task"
            )
        action = given.long().argmax(1, keepdim=True)  # one-hot
    else:
        action = folder.read("action", 1 if single else spec.shape[-1], torch.float32)
    wrong = ((action != action.long()) | (action < 0) | (action >= counts)).any(1)
    if wrong.any():
        raise folder.error(
            f"has the action {action[wrong][0].tolist()}, and the task's are whole numbers from 0 "
            f"to below {counts.tolist()}; give demonstrations of this task"
        )
    return action.long().squeeze(1) if single else action.long()


# ------------------------------------------------------------------------------------ recording

#: Steps that are recorded at a time.
_STEPS = 250


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
    """``klrl record RUN``: write the episodes that ended; returns their evaluation."""
    agent, episodes = trained_agent(run, which, str(device)), list[TensorDictBase]()
    ends = ("done", "terminated", "truncated")
    after = [("next", key) for key in ("observation", "reward", *ends)]
    keys = ("observation", "action", agent.family.sample_key, *ends, *after)

    def played() -> Iterator[Scores]:
        for begun in range(0, size.episodes, MAX_COPIES):
            count = min(MAX_COPIES, size.episodes - begun)
            seed = derived_seed(starts.seed, starts.use, begun)
            env = make_env(config.env, seed=seed, num_envs=count)
            rollout = VectorRollout(env, agent, _STEPS, device, sampled=sampled)
            parts: list[TensorDictBase] = []
            ended = torch.zeros(count, dtype=torch.bool)
            while not ended.all() and len(parts) * _STEPS < MAX_STEPS:
                parts.append(rollout.collect().cpu())
                ended |= parts[-1]["next", "done"].any(1)[:, 0]
            rollout.close()
            batch, returns = TensorDict.cat(parts, 1), list[float]()
            for row in batch[ended]:
                frames = row[: int(row["next", "done"].int().argmax()) + 1]
                returns.append(float(frames["next", "episode_reward"][-1]))
                number = torch.full((len(frames),), len(episodes))
                episodes.append(frames.select(*keys).set("episode", number))
            yield Scores(returns, cut=count - len(returns))

    result = evaluation(played(), CONTROL, "sampled" if sampled else CONTROL.mode, starts)
    if episodes:
        part = into.with_name(f".{into.name}.part")
        try:
            TensorDict.cat(episodes).memmap(part)
            part.rename(into)
        finally:
            shutil.rmtree(part, ignore_errors=True)
    return result
