"""Reads demonstrations: frames [F] of any policy's episodes (docs/imitation.md)."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torch.nn.functional import one_hot

from klrl.base.errors import ConfigError, first_line
from klrl.base.files import expanded, files_below, read_plain
from klrl.base.seeds import derived_seed
from klrl.config import Config, DemonstrationsConfig
from klrl.control.env.copies import VectorGymEnv
from klrl.control.policy.distributions import EXCLUDED, Family, MultiCategorical, TanhNormalFamily
from klrl.control.policy.networks import Agent
from klrl.control.run.rollout import add_policy
from klrl.runs.metrics import Row

#: Largest allowed number; the squares in a log-likelihood could overflow float32 above it.
LARGEST = 1e15
_ANY = torch.tensor(math.inf)
_REWARD, _FLAGS = ("next", "reward"), ("done", "terminated", "truncated")


class Demonstrations:
    """``collector=demonstrations``: makes rollouts from pieces of consecutive frames.

    Rollout i depends only on the data, the seed and i, so a checkpoint stores only a digest of the
    data. ``frames`` [F] excludes the held-out episodes.
    """

    iteration = 0  # index of the next rollout

    def __init__(self, config: Config, agent: Agent, env: VectorGymEnv) -> None:
        assert isinstance(config.collector, DemonstrationsConfig)
        steps, share = config.collector.steps, config.collector.held_out
        self._shape, self._seed = (config.env.num_envs, steps), derived_seed(config.seed, "data")
        self._folder, self._agent = _Folder(config.collector.data), agent
        setting, (frames, cuts) = self._folder.setting, _frames(self._folder, config, agent, env)
        sha = hashlib.sha256()
        for value in frames.values(True, True, sort=True):
            sha.update(value.contiguous().numpy())
        self._digest = sha.hexdigest()
        ends = frames["next", "done"].flatten()
        episodes = int(ends.sum())
        if share and episodes < 2:
            raise ConfigError(
                f"collector.held_out={share:g}: {setting} holds one episode; give more, or 0"
            )
        # The held-out episodes are random, but the same for every seed.
        count = min(max(round(share * episodes), 1), episodes - 1) if share else 0
        held = torch.from_numpy(np.random.default_rng(0).permutation(episodes)[:count])
        out = torch.isin(ends.cumsum(0) - ends.long(), held)
        self.frames, self._held = frames[~out], frames[out]
        if len(self.frames) < steps:
            raise ConfigError(
                f"collector.steps={steps}: {setting} has {len(self.frames)} frames to learn from; "
                "choose fewer"
            )
        why = f" ({cuts:,} cut where next.observation is not the next frame's observation)"
        self.note = f"{setting}: {episodes} episodes{why * bool(cuts)}, {len(frames):,} frames, "
        self.note += f"{len(self._held):,} of them held out"

    def collect(self) -> TensorDictBase:
        """Make the next rollout [N, T]; add the current policy's parameters and log-probs.

        Each pass starts at a random frame, continues from the last frame to the first, cuts the
        frames into pieces of T, and shuffles the pieces. A piece may contain ends of episodes.
        """
        (rows, steps), total = self._shape, len(self.frames)
        starts = np.empty(rows, np.int64)
        for row in range(rows):
            epoch, place = divmod(self.iteration * rows + row, total // steps)
            rng = np.random.default_rng((self._seed, epoch))
            starts[row] = rng.integers(total) + rng.permutation(total // steps)[place] * steps
        self.iteration += 1
        return self._scored(self.frames[(starts[:, None] + np.arange(steps)) % total])

    def held_out(self) -> Row:
        """Measure the mean negative log-likelihood of held-out frames, in nats per frame.

        Uses at most N * T frames (as many as a rollout has), evenly spaced.
        """
        if not len(self._held):
            return {}
        few = self._scored(self._held[:: -(-len(self._held) // math.prod(self._shape))])
        return {"nll/held_out": -float(few["action_log_prob"].double().mean())}

    @torch.no_grad()
    def _scored(self, frames: TensorDict) -> TensorDict:
        frames = frames.to(next(self._agent.actor.parameters()).device)
        add_policy(self._agent, frames)
        return frames

    def close(self) -> None:
        """Do nothing: no resource is open."""

    def state_dict(self) -> dict[str, object]:
        """The digest of the data."""
        return {"data": self._digest}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Refuse data that have changed since the run began."""
        if state.get("data") != self._digest:
            raise self._folder.error(
                "its frames have changed since the run began; restore them, or start a new run"
            )


# -------------------------------------------------------------------------------------- reading


class _Folder:
    """Reads the entries of a data folder; errors name the setting and the entry."""

    def __init__(self, path: str) -> None:
        folder, self.setting = expanded(path), f"data={path}"
        if (folder / "storage").is_dir():  # written by ReplayBuffer.dumps
            folder /= "storage"
        try:
            _require_whole(folder)
            self.data = TensorDict.load_memmap(folder, allow_pickle=False)
            size = folder / "storage_metadata.json"
            if size.is_file():  # a buffer that is not full ends with unused frames
                self.data = self.data[: json.loads(read_plain(size))["len"]]
        except Exception as error:  # tensordict raises many types of errors
            remedy = (
                "give a whole folder that klrl record or TensorDict.memmap wrote, of tensors alone"
            )
            raise self.error(f"cannot be read ({first_line(error)}); {remedy}") from error
        if self.data.ndim != 1 or not len(self.data):
            raise self.error(f"has the shape {list(self.data.shape)}; give frames [F]")

    def error(self, text: str) -> ConfigError:
        return ConfigError(f"{self.setting}: {text}")

    def read(
        self,
        key: str | tuple[str, str],
        dtype: torch.dtype,
        *widths: int,
        missing: Tensor | None = None,
        below: Tensor = _ANY,
    ) -> Tensor:
        """Read an entry [F, W], W in ``widths``; return ``missing`` if the folder lacks it.

        Where ``below`` [W] is finite, values must be integers with 0 <= value < ``below``.
        """
        value, name = self.data.get(key, None), key if isinstance(key, str) else ".".join(key)
        other = ", or set loss=nll loss.critic_coeff=0" * (key == _REWARD)
        if value is None:
            if missing is None:
                raise self.error(f"holds no {name}; give demonstrations of this task{other}")
            return missing
        value = value.reshape(len(self.data), -1)
        if value.shape[1] not in widths:
            raise self.error(
                f"its {name} has {value.shape[1]} numbers per frame, the task's has {widths[0]}; "
                "give demonstrations of this task"
            )
        wide = value.double()
        if not (wide.abs() <= LARGEST).all():
            raise self.error(
                f"its {name} is not finite, or above {LARGEST:g}; drop such episodes{other}"
            )
        wrong = below.isfinite() & ((wide != wide.floor()) | (wide < 0) | (wide >= below))
        if wrong.any():
            raise self.error(
                f"its {name} has {wide[wrong][0]:g}, which is no byte, index or mask of the task; "
                "give the environment's own values"
            )
        return value.to(dtype)


def _require_whole(folder: Path) -> None:
    """Refuse a file that is too short, to which torch would append zeros, or no regular file."""
    for meta in (file for file in files_below(folder) if file.name == "meta.json"):
        for name, entry in json.loads(read_plain(meta)).items():
            if (file := meta.parent / f"{name}.memmap").is_file():
                item = getattr(torch, entry["dtype"].removeprefix("torch.")).itemsize
                size, whole = file.stat().st_size, math.prod(entry["shape"]) * item
                if size < whole:
                    raise ValueError(f"{file.name} has {size:,} bytes, not {whole:,}")


def _frames(
    folder: _Folder, config: Config, agent: Agent, env: VectorGymEnv
) -> tuple[TensorDict, int]:
    """Return frames [F] with the keys of a rollout, and the number of episodes that are cut."""
    spec, no = env.observation_spec_unbatched["observation"], torch.zeros(len(folder.data), 1)
    like = (spec.dtype, spec.shape[-1])
    below = torch.full(spec.shape[-1:], math.inf)
    for entry, place in env.layout.places() if env.layout else ():
        limit = {"vector": math.inf, "index": entry.counts}.get(entry.kind, 256)
        below[place] = torch.tensor(limit)
    observation = folder.read("observation", *like, below=below)
    episode = folder.read("episode", torch.float64, 1, missing=no)
    done, terminated, truncated = (
        folder.read(("next", name), torch.bool, 1, missing=no.bool()) for name in _FLAGS
    )
    ends = done | terminated | truncated | (episode != episode.roll(-1, 0))
    ends[-1] = True
    next_row = observation.roll(-1, 0)
    after = torch.where(ends, observation, next_row)
    after = folder.read(("next", "observation"), *like, missing=after, below=below)
    # If a buffer has several copies or dropped frames, the next row may be of another episode.
    cut = ~ends & (after != next_row).any(1, keepdim=True)
    ends |= cut
    reward, critic = no, config.loss.critic_coeff > 0
    try:
        reward = folder.read(_REWARD, torch.float32, 1, missing=None if critic else no)
    except ConfigError:
        if critic or config.loss.name != "nll":  # else the run only records rewards
            raise
    following = {
        "observation": after,
        "reward": reward,
        **dict(zip(_FLAGS, (ends, terminated, ends & ~terminated), strict=True)),
    }
    actions = _actions(folder, agent, observation)
    if (observation == observation[0]).all():
        raise folder.error(
            f"its observation is the same in all {len(observation):,} frames, as TorchRL 0.14.1 "
            "reads Minari's data; see Minari in docs/imitation.md"
        )
    root = {"observation": observation, **actions, "next": following}
    return TensorDict(root, [len(folder.data)]), int(cut.sum())


def _actions(folder: _Folder, agent: Agent, observation: Tensor) -> dict[str, Tensor]:
    """Read the action, and for ``tanh_normal`` the value before tanh."""
    family, outputs = agent.family, agent.policy_net.outputs
    if "logits" in family.param_keys:
        chosen = _choices(folder, family, outputs)
        free = agent.policy_net.allowed(torch.zeros(len(chosen), outputs), observation)
        excluded = family.log_prob({"logits": free}, chosen) < EXCLUDED / 2
        if excluded.any():
            raise folder.error(
                f"its frame {int(excluded.nonzero()[0])} has the action "
                f"{chosen[excluded][0].tolist()}, which action_mask excludes; drop such episodes"
            )
        return {"action": chosen}
    action = folder.read("action", torch.float32, outputs)
    if not isinstance(family, TanhNormalFamily):
        return {"action": action}
    unit = (action - family.low) / family.half_width.cpu() - 1  # -1 .. 1
    if (unit.abs() > 1 + 1e-5).any():
        raise folder.error(
            f"has the action {action.flatten()[unit.abs().argmax()]:g}, out of bounds, which "
            "actor=tanh_normal never leaves; choose actor=normal"
        )
    inverse = unit.double().clamp(-1 + 1e-6, 1 - 1e-6).atanh().float()
    inverse = folder.read("pre_tanh", torch.float32, outputs, missing=inverse)
    if ((family.action(inverse) - action).abs() > 1e-3 * family.half_width.cpu()).any():
        raise folder.error(
            "its pre_tanh and its action disagree within the task's bounds; drop pre_tanh, or "
            "give demonstrations of this task"
        )
    return {"action": action, "pre_tanh": inverse}


def _choices(folder: _Folder, family: Family, outputs: int) -> Tensor:
    """Read discrete actions as numbers from 0: [F], or [F, M] for M choices in each step."""
    several = isinstance(family, MultiCategorical)
    counts = [*family.counts] if isinstance(family, MultiCategorical) else [outputs]
    action = folder.read("action", torch.float32, *([len(counts)] if several else [1, outputs]))
    number = action.long()
    if action.shape[1] > len(counts):
        number = action.argmax(1, keepdim=True)
        wrong = (one_hot(number[:, 0], outputs) != action).any(1)
    else:
        wrong = ((number != action) | (number < 0) | (number >= torch.tensor(counts))).any(1)
    if wrong.any():
        raise folder.error(
            f"has the action {action[wrong][0].tolist()}, and the task's are whole numbers from 0 "
            f"to below {counts}; give demonstrations of this task"
        )
    return number if several else number.squeeze(1)
