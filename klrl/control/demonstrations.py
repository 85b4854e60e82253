"""``collector=demonstrations``: read a folder of frames, hold episodes out, serve the rest.

The folder has TorchRL's memory-mapped format: a TensorDict [F] of frames, or [N, T] of rows in
time, as its data sets, ``TensorDict.memmap`` and ``ReplayBuffer.dumps`` write it.

| key | shape | if it is missing |
|---|---|---|
| observation | [F, D] | refused |
| action | [F, A] or [F], one-hot or numbers | refused |
| episode, ("next", "done") | [F], [F, 1] | the other one ends episodes; without both, one episode |
| ("next", "terminated") | [F, 1] | no episode terminates, all are cut off |
| ("next", "reward") | [F, 1] | refused, unless loss.critic_coeff=0 |
| ("next", "observation") | [F, D] | the next frame's; at an episode's end its own |
| pre_tanh | [F, A] | of ``tanh_normal``: the inverse of the action, at most 7.25 in size |
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from klrl.base.errors import ConfigError, first_line
from klrl.base.files import expanded
from klrl.base.seeds import derived_seed
from klrl.config import Config, DemonstrationsConfig
from klrl.control.actor import Agent
from klrl.control.copies import VectorGymEnv
from klrl.control.distributions import Categorical, Family, TanhNormalFamily
from klrl.control.vector import add_policy
from klrl.runs.metrics import Row

#: A bounded action is at most this near to its bound, in half widths: its inverse is finite.
_MARGIN = 1e-6


class Demonstrations:
    """The frames of ``data=``: a collector of shuffled pieces, and a component of checkpoints.

    Rollout i depends on data, seed and i alone, so a checkpoint has only a digest of the data.
    """

    def __init__(self, config: Config, agent: Agent, env: VectorGymEnv) -> None:
        settings = config.collector
        assert isinstance(settings, DemonstrationsConfig)
        self._setting = f"data={settings.data}"
        self._settings, self._agent = settings, agent
        self._seed = derived_seed(config.seed, "data")
        data = _load(str(settings.data), self._setting)
        self._digest = _digest(data)
        rewarded = ("next", "reward") in data.keys(include_nested=True)
        if not rewarded and config.loss.critic_coeff:
            raise ConfigError(
                f"{self._setting}: holds no next.reward for the critic; set loss.critic_coeff=0"
            )
        frames = _frames(data, env, agent.family, self._setting)
        self._frames, self._held = self._split(frames, settings.held_out)
        if len(self._frames) < settings.steps:
            raise ConfigError(
                f"collector.steps={settings.steps}: {self._setting} has {len(self._frames)} frames "
                "to learn from; choose fewer"
            )

    def _split(self, frames: TensorDict, share: float) -> tuple[TensorDict, TensorDict]:
        """Hold out whole episodes, at random but equally for every seed."""
        ends = frames["next", "done"].flatten()
        number = ends.cumsum(0) - ends.long()
        self.episodes = int(ends.sum())
        if not share:
            return frames, frames[:0]
        if self.episodes < 2:
            raise ConfigError(
                f"collector.held_out={share:g}: {self._setting} holds one episode; give more, or 0"
            )
        count = min(max(round(share * self.episodes), 1), self.episodes - 1)
        held = torch.from_numpy(np.random.default_rng(0).permutation(self.episodes)[:count])
        out = torch.isin(number, held)
        return frames[~out], frames[out]

    @property
    def notes(self) -> list[str]:
        """The line at the start of a run."""
        kept, held = len(self._frames), len(self._held)
        size = f"{self.episodes} episodes, {kept + held:,} frames"
        return [f"{self._setting}: {size}, {held:,} of them held out"]

    def observations(self) -> Tensor:
        """All observations to learn from [F, D], for the observation statistics."""
        return self._frames["observation"]

    @torch.no_grad()
    def held_out(self, most: int) -> Row:
        """The negative log-likelihood of held-out frames, nats per frame: ``most`` of them."""
        if not len(self._held):
            return {}
        stride = -(-len(self._held) // most)
        few = self._held[::stride].to(next(self._agent.networks.parameters()).device)
        add_policy(self._agent, few)
        return {"nll/held_out": -float(few["action_log_prob"].double().mean())}

    def rollout(
        self, iteration: int, device: torch.device, begin: Callable[[], None]
    ) -> DemonstrationRollout:
        """Open the collector at an iteration; ``begin`` is called before each rollout."""
        return DemonstrationRollout(self, iteration, device, begin)

    def batch(self, iteration: int) -> TensorDict:
        """Rollout number ``iteration``: pieces [N, T] of consecutive frames.

        A pass over the frames cuts them at a random offset into pieces, and shuffles these; the
        frames are a circle, whose ends are ends of episodes.
        """
        rows, steps, total = self._settings.pieces, self._settings.steps, len(self._frames)
        each = total // steps
        starts = np.empty(rows, np.int64)
        for row in range(rows):
            epoch, place = divmod(iteration * rows + row, each)
            rng = np.random.default_rng((self._seed, epoch))
            starts[row] = rng.integers(total) + rng.permutation(each)[place] * steps
        index = torch.from_numpy((starts[:, None] + np.arange(steps)) % total)
        batch: TensorDict = self._frames[index]
        batch.names = [None, "time"]
        return batch

    def state_dict(self) -> dict[str, object]:
        """The digest of the data."""
        return {"data": self._digest}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Refuse data other than those that the run began with."""
        if state.get("data") != self._digest:
            raise ConfigError(
                f"{self._setting}: holds other frames than this run began with; bring them back, "
                "or start another run"
            )


class DemonstrationRollout:
    """Serves the rollouts from an iteration on, scored by the current policy."""

    def __init__(
        self, data: Demonstrations, iteration: int, device: torch.device, begin: Callable[[], None]
    ) -> None:
        self._data, self._iteration, self._device, self._begin = data, iteration, device, begin

    @torch.no_grad()
    def collect(self) -> TensorDictBase:
        """The next rollout, [N, T], with parameters and log-probs of the current policy."""
        self._begin()
        batch = self._data.batch(self._iteration).to(self._device)
        self._iteration += 1
        add_policy(self._data._agent, batch)
        return batch

    def close(self) -> None:
        """Do nothing: nothing is open."""


# -------------------------------------------------------------------------------------- reading


def _load(path: str, setting: str) -> TensorDict:
    """The frames of a folder, [F, ...]; the last frame of a row in time ends an episode."""
    folder, remedy = expanded(path), "give a folder that klrl record or TensorDict.memmap wrote"
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "no such folder"
        raise ConfigError(f"{setting}: {what}; {remedy}")
    if (folder / "storage").is_dir():  # ReplayBuffer.dumps
        folder /= "storage"
    try:
        data = TensorDict.load_memmap(folder)
        size = folder / "storage_metadata.json"
        if size.is_file():  # a buffer that was not full
            data = data[: json.loads(size.read_text())["len"]]
    except Exception as error:  # tensordict's have no common base
        raise ConfigError(f"{setting}: cannot be read ({first_line(error)}); {remedy}") from error
    if data.ndim not in (1, 2) or not data.numel():
        raise ConfigError(f"{setting}: has the shape {list(data.shape)}; give frames [F] or [N, T]")
    if data.ndim == 2:
        last = torch.zeros(data.shape, dtype=torch.bool)
        last[:, -1] = True
        data = data.clone(recurse=False).set("row_ends", last).reshape(-1)
    return data


def _digest(data: TensorDictBase) -> str:
    """SHA-256 over all entries, by name."""
    sha = hashlib.sha256()
    for key in sorted(data.keys(True, True), key=str):
        value = data.get(key)
        if isinstance(value, Tensor):
            sha.update(f"{key} {value.dtype} {tuple(value.shape)}".encode())
            sha.update(value.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


def _frames(data: TensorDict, env: VectorGymEnv, family: Family, setting: str) -> TensorDict:
    """Frames [F] with the keys of a rollout, checked against the task."""
    count = len(data)

    def numbers(key: Any, width: int, like: torch.dtype) -> Tensor:
        value = data.get(key)
        shown = key if isinstance(key, str) else ".".join(key)
        flat = torch.as_tensor(value).reshape(count, -1)
        if flat.shape[1] != width:
            raise ConfigError(
                f"{setting}: its {shown} has {flat.shape[1]} numbers per frame, and that of "
                f"{env._setting} has {width}; give demonstrations of this task"
            )
        if not torch.isfinite(flat).all():
            raise ConfigError(f"{setting}: its {shown} is not finite; drop such episodes")
        return flat.to(like)

    present = set(data.keys(True, True))
    for key in ("observation", "action"):
        if key not in present:
            raise ConfigError(f"{setting}: holds no {key}; it has {_shown(present)}")
    seen = env.observation_spec_unbatched["observation"]
    observation = numbers("observation", seen.shape[-1], seen.dtype)
    ends = _ends(data, present)
    after = observation.roll(-1, 0)
    after[ends] = observation[ends]
    if ("next", "observation") in present:
        after = numbers(("next", "observation"), seen.shape[-1], seen.dtype)
    reward = torch.zeros(count, 1)
    if ("next", "reward") in present:
        reward = numbers(("next", "reward"), 1, torch.float32)
    terminated = torch.zeros(count, dtype=torch.bool)
    if ("next", "terminated") in present:
        terminated = data.get(("next", "terminated")).reshape(-1).bool()
    no = torch.zeros(count, 1, dtype=torch.bool)
    begins = ends.roll(1)  # the frames are a circle
    returns, lengths = _sums(reward.flatten(), begins)
    root = {
        "observation": observation,
        **_actions(data, numbers, env, family, setting),
        **{key: no.clone() for key in ("done", "terminated", "truncated")},
        "next": {
            "observation": after,
            "reward": reward,
            "done": ends.unsqueeze(1),
            "terminated": terminated.unsqueeze(1),
            "truncated": (ends & ~terminated).unsqueeze(1),
            "episode_reward": returns.unsqueeze(1),
            "step_count": lengths.unsqueeze(1),
        },
    }
    return TensorDict(root, [count])


def _shown(present: set[Any]) -> str:
    return ", ".join(sorted(key if isinstance(key, str) else ".".join(key) for key in present))


def _ends(data: TensorDictBase, present: set[Any]) -> Tensor:
    """[F] bool: the last frame of each episode."""
    ends = torch.zeros(len(data), dtype=torch.bool)
    for key in ("row_ends", *(("next", name) for name in ("done", "terminated", "truncated"))):
        if key in present:
            ends |= data.get(key).reshape(-1).bool()
    if "episode" in present:
        episode = data.get("episode").reshape(-1)
        ends |= episode != episode.roll(-1)
    ends[-1] = True
    return ends


def _sums(reward: Tensor, begins: Tensor) -> tuple[Tensor, Tensor]:
    """Return and length of each episode so far, [F] each."""
    first = torch.where(begins, torch.arange(len(begins)), 0).cummax(0).values
    total = reward.double().cumsum(0)
    before = total[first] - reward.double()[first]
    return (total - before).float(), torch.arange(len(begins)) - first + 1


def _actions(
    data: TensorDictBase,
    numbers: Callable[[Any, int, torch.dtype], Tensor],
    env: VectorGymEnv,
    family: Family,
    setting: str,
) -> dict[str, Tensor]:
    """The actions, and for ``tanh_normal`` their inverses."""
    spec = env.action_spec_unbatched
    if "logits" in family.param_keys:
        return {"action": _choices(data.get("action"), family, spec, setting)}
    action = numbers("action", spec.shape[-1], torch.float32)
    if not isinstance(family, TanhNormalFamily):
        return {"action": action}
    unit = (action - family.low) / family.half_width.cpu() - 1  # in -1 .. 1
    if (unit.abs() > 1 + 1e-5).any():
        worst = action.flatten()[unit.abs().argmax()]
        raise ConfigError(
            f"{setting}: has the action {worst:g}, outside the bounds of {env._setting}, which "
            "actor=tanh_normal never leaves; choose actor=normal"
        )
    if "pre_tanh" in data.keys():
        return {"action": action, "pre_tanh": numbers("pre_tanh", spec.shape[-1], torch.float32)}
    inverse = unit.double().clamp(-1 + _MARGIN, 1 - _MARGIN).atanh().float()
    return {"action": action, "pre_tanh": inverse}


def _choices(action: Tensor, family: Family, spec: Any, setting: str) -> Tensor:
    """Discrete actions as numbers from 0, [F] or [F, M]; a one-hot action is its place."""
    flat = action.reshape(len(action), -1)
    counts = torch.as_tensor(getattr(spec, "nvec", getattr(spec, "n", 2))).reshape(-1)
    single = type(family) is Categorical
    width = 1 if single else spec.shape[-1]
    if single and flat.shape[1] == int(counts[0]) > 1 and bool((flat.long().sum(1) == 1).all()):
        flat = flat.long().argmax(1, keepdim=True)
    if flat.shape[1] != width:
        raise ConfigError(
            f"{setting}: its action has {flat.shape[1]} numbers per frame, and that of the task "
            f"has {width}; give demonstrations of this task"
        )
    whole = flat.long()
    if (whole != flat).any() or (whole < 0).any() or (whole >= counts).any():
        bad = flat[((whole != flat) | (whole < 0) | (whole >= counts)).any(1)][0].tolist()
        raise ConfigError(
            f"{setting}: has the action {bad}, and the task's are whole numbers from 0 to below "
            f"{counts.tolist()}; give demonstrations of this task"
        )
    return whole.squeeze(1) if single else whole
