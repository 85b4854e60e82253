"""Collect rollouts by klrl's loop or by TorchRL; save and restore running episodes.

``collector=vector`` gives the batches of ``collector=torchrl``. In each step, TorchRL's collector
builds a dozen TensorDicts and a distribution. klrl's loop writes the results of the simulators to
tensors [T, N] on their device; on the CPU numpy does this, whose calls cost less. Where no episode
ends, a step waits for a device once, to know that. Transforms change no input of the policy or the
simulators, so they are applied to the finished batch. Distribution parameters and log-probs are
computed once for the whole rollout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.envs import Compose, RewardSum, StepCounter, Transform, TransformedEnv

from klrl.base.errors import first_line
from klrl.base.seeds import generators_kept
from klrl.base.text import warn
from klrl.config import CollectorConfig, Config, DemonstrationsConfig, factory
from klrl.control.env.copies import VectorGymEnv, transformed
from klrl.control.env.simulators import Native, functions, native
from klrl.control.policy.acting import NumpyActing, make_acting
from klrl.control.policy.networks import Agent

#: What the user reads about simulators whose library drops last observations.
NO_LAST = (
    "environment: its library gives no last observation of an episode; a truncated episode "
    "bootstraps from the value of the observation before it"
)


def _leaves(transform: Transform) -> list[Transform]:
    if isinstance(transform, Compose):
        return [leaf for part in transform.transforms for leaf in _leaves(part)]
    return [transform]


def add_policy(agent: Agent, batch: TensorDictBase) -> None:
    """Add the distribution's parameters and the log-probs of the actions, by one forward."""
    family = agent.family
    outputs = agent.policy_net(batch.get("observation"))
    params = dict(zip(family.param_keys, outputs, strict=True))
    for key, value in params.items():
        batch.set(key, value)
    batch.set("action_log_prob", family.log_prob(params, batch.get(family.sample_key)))


class VectorRollout:
    """``collector=vector``: ``steps`` steps of every copy; deterministic unless ``sampled``."""

    sampled = True

    def __init__(self, env: TransformedEnv, agent: Agent, steps: int, device: torch.device) -> None:
        self._env, self._base = env, env.base_env
        self._transforms = _leaves(env.transform)
        self._agent, self._steps, self._device = agent, steps, device
        self._simulators: str = env.base_env.simulators.device
        self._acting = make_acting(agent, device, self._simulators)
        self._copies = env.batch_size[0]
        self._seen = env.observation_spec["observation"]
        self._observation: Tensor | None = None
        self._told = False  # whether the user knows that last observations are lacking
        self._trajectories = np.arange(self._copies)
        self._next_trajectory = self._copies
        #: What transforms wrote in the last step, for the next rollout; 0 where an episode ended.
        self._carried = TensorDict({}, [self._copies])

    def collect(self) -> TensorDictBase:
        """Collect the next rollout [N, T]."""
        if not self._base.simulators.intact:  # an evaluation stepped the same simulators
            self.restart()
        with torch.no_grad():
            batch = self._play().to(self._device)
            add_policy(self._agent, batch)
            for transform in self._transforms:
                self._apply(transform, batch)
            self._add_before(batch)
        return batch

    def close(self) -> None:
        """Close the environment."""
        self._env.close()

    def restart(self) -> None:
        """Begin new episodes with the next rollout."""
        self._observation, self._carried = None, TensorDict({}, [self._copies])
        self._trajectories = self._next_trajectory + np.arange(self._copies)
        self._next_trajectory += self._copies

    def state_dict(self) -> dict[str, Any]:
        """Return the state at the start of the next rollout; empty if it cannot be saved."""
        episodes = None if self._observation is None else self._base.episodes()
        if self._observation is None or episodes is None:
            return {}
        return {
            "episodes": episodes,
            "observation": self._observation.cpu(),
            "trajectories": torch.from_numpy(self._trajectories),
            "next_trajectory": self._next_trajectory,
            "carried": self._carried.to_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore :meth:`state_dict`."""
        self._base.play_again(state["episodes"])
        self._observation = state["observation"].to(self._simulators)
        self._trajectories = state["trajectories"].cpu().numpy()
        self._next_trajectory = int(state["next_trajectory"])
        self._carried = TensorDict(state["carried"], [self._copies])

    # ---------------------------------------------------------------------------- simulators

    def _play(self) -> TensorDict:
        """Step the simulators; return their outputs and the policy's samples [N, T]."""
        base, acting, number, flag = self._base, self._acting, torch.float32, torch.bool
        seen, after = (self._room(self._seen.dtype, *self._seen.shape[1:]) for _ in range(2))
        rewards, terminated, truncated = map(self._room, (number, flag, flag))
        observations, results = native(seen), [native(x) for x in (after, rewards)]
        ends = native(terminated), native(truncated)
        samples: list[Native] = []
        actions: list[Native] = []
        if self.sampled:
            acting.begin(self._steps, self._copies)
        begun = self._observation
        observation = self._reset(None) if begun is None else native(begun)
        xp = functions(observation)
        for t in range(self._steps):
            observations[t] = observation
            samples.append(acting.sample(t, observations[t]))
            actions.append(acting.action(samples[-1]))
            observation, reward, terminal, timeout = base.step_native(actions[-1])
            results[0][t], results[1][t] = observation, reward
            ended = terminal | timeout
            if xp.count_nonzero(ended):  # waits for a device; in numpy, any() takes 1 us
                ends[0][t], ends[1][t] = terminal, timeout
                observation = self._reset(ended)
        self._observation = torch.empty_like(seen[0])
        native(self._observation)[:] = observation  # of any strides, which torch may not take
        done = terminated | truncated
        if not base.simulators.final:  # V(s_t) is the best estimate of V(s_{t+1})
            after[done] = seen[done]
            if not self._told:
                warn(NO_LAST)
                self._told = True
        taken = {"action": actions, self._agent.family.sample_key: samples}  # often the same
        flags = {"done": done, "terminated": terminated, "truncated": truncated}
        flags = {key: value.T.contiguous().unsqueeze(-1) for key, value in flags.items()}
        root = {
            "observation": seen.transpose(0, 1).contiguous(),
            **{key: torch.as_tensor(xp.stack(each, 1)) for key, each in taken.items()},
            **{key: torch.zeros_like(value) for key, value in flags.items()},
            "collector": {"traj_ids": self._number(done.T.cpu().numpy()).to(done.device)},
            "next": {
                "observation": base.observed(after.transpose(0, 1), "after a step"),
                "reward": base.finite("reward", rewards.T.unsqueeze(-1), "after a step"),
                **flags,
            },
        }
        return TensorDict(root, [self._copies, self._steps], names=[None, "time"])

    def _room(self, dtype: torch.dtype, *shape: int) -> Tensor:
        """Make a tensor of zeros [T, N, ...] on the simulators' device."""
        size = (self._steps, self._copies, *shape)
        return torch.zeros(size, dtype=dtype, device=self._simulators)

    def _reset(self, mask: Native | None) -> Native:
        """Reset all copies, or those in ``mask`` [N]; the others keep the result of their step."""
        observation = begun = self._base.reset_native(mask)
        if mask is not None:
            begun = functions(observation).where(mask[:, None], observation, 0)
        self._base.observed(begun, "at reset")  # refuses NaN
        return observation

    def _number(self, ended: np.ndarray) -> Tensor:
        """Assign trajectory ids [N, T]; after an episode ends, its copy gets the next free id."""
        ids = np.empty(ended.shape, np.int64)
        start = 0
        for t in np.flatnonzero(ended.any(0)).tolist():
            ids[:, start : t + 1] = self._trajectories[:, None]
            start = t + 1
            count = int(ended[:, t].sum())
            self._trajectories[ended[:, t]] = self._next_trajectory + np.arange(count)
            self._next_trajectory += count
        ids[:, start:] = self._trajectories[:, None]
        return torch.from_numpy(ids)

    # --------------------------------------------------------------------------------- batch

    def _apply(self, transform: Transform, batch: TensorDictBase) -> None:
        after = batch.get("next")
        if isinstance(transform, RewardSum):
            self._accumulate(batch, "episode_reward", after.get("reward"))
        elif isinstance(transform, StepCounter):
            one = torch.ones_like(after.get("reward"), dtype=torch.int64)
            self._accumulate(batch, "step_count", one)
        else:
            transform(batch)

    def _accumulate(self, batch: TensorDictBase, key: str, value: Tensor) -> None:
        """Write the sums [N, T, 1] of ``value`` since the start of each episode to "next".

        The sum of a running episode continues from the last rollout. Values are added in the order
        of time, so that the rounding equals TorchRL's.
        """
        ended = native(batch.get(("next", "done"))[..., 0].to(self._simulators))
        sums = native(value[..., 0].to(self._simulators, copy=True))
        kept, start, xp = self._carried.get(key, None), 0, functions(sums)
        last: Any = 0 if kept is None else native(kept[:, 0].to(self._simulators))
        over = torch.as_tensor(ended).any(0).nonzero()[:, 0].tolist()
        for stop in sorted({*(t + 1 for t in over), self._steps}):
            piece = sums[:, start:stop]
            piece[:, 0] += last
            xp.cumsum(piece, 1, out=piece)
            start, last = stop, xp.where(ended[:, stop - 1], 0, piece[:, -1])
        batch.set(("next", key), torch.as_tensor(sums).unsqueeze(-1).to(value.device))

    def _add_before(self, batch: TensorDictBase) -> None:
        """Copy each transform's entries under "next" to the following step; 0 after a reset."""
        after = batch.get("next")
        ended = after.get("done")[..., 0]
        for key in self._env.observation_spec.keys(include_nested=True, leaves_only=True):
            if key == "observation":
                continue
            value = after.get(key)
            before = torch.zeros_like(value)
            before[:, 1:] = value[:, :-1]
            before[:, 1:][ended[:, :-1]] = 0
            if (carried := self._carried.get(key, None)) is not None:
                before[:, 0] = carried
            last = value[:, -1].clone()
            last[ended[:, -1]] = 0
            self._carried.set(key, last)
            batch.set(key, before)


class TorchRLRollout:
    """``collector=torchrl``: TorchRL's Collector; a rollout has ``steps`` steps of every copy.

    A resume begins new episodes: the Collector's ``state_dict`` lacks the running ones.
    """

    def __init__(self, env: TransformedEnv, agent: Agent, steps: int, device: torch.device) -> None:
        from torchrl.collectors import Collector  # slow: imports all collectors

        self._collector = Collector(
            env,
            agent.actor,
            frames_per_batch=steps * env.batch_size[0],
            total_frames=-1,
            policy_device=device,
            env_device=torch.device("cpu"),
            storing_device=device,
            # Silences TorchRL 0.14's FutureWarning; nothing here needs an InitTracker.
            auto_register_policy_transforms=False,
        )
        self._batches: Iterator[TensorDictBase] = iter(self._collector)
        self._base = env.base_env

    def collect(self) -> TensorDictBase:
        """Collect the next rollout [N, T]."""
        if not self._base.simulators.intact:  # an evaluation stepped the same simulators
            self._collector.reset()
        return next(self._batches)

    def close(self) -> None:
        """Close the collector and its environment."""
        self._collector.shutdown()


def make_rollout(
    config: Config,
    copies: VectorGymEnv,
    agent: Agent,
    transforms: tuple[Transform, ...],
    device: torch.device,
) -> VectorRollout | TorchRLRollout:
    """Make the chosen ``collector``; ``transforms`` are applied to each step."""
    make = factory("collector", config.collector, config.domain)
    rollout: VectorRollout | TorchRLRollout = make(
        transformed(copies, transforms), agent, config.collector.steps, device
    )
    return rollout


def described(
    config: CollectorConfig, copies: VectorGymEnv, agent: Agent, device: torch.device
) -> str:
    """Say how rollouts are collected, in words for the user."""
    if isinstance(config, DemonstrationsConfig):
        return f"collector={config.name}, read from {config.data}"
    made = make_acting(agent, device, copies.simulators.device)
    acts = "numpy" if isinstance(made, NumpyActing) else "torch"
    acts = "TorchRL's modules" if config.name == "torchrl" else acts
    return f"collector={config.name}, {copies.simulators.stepped}, policy in {acts}"


# ------------------------------------------------------------------ running episodes, for resume


class RunningEpisodes:
    """Checkpoint component with the running episodes and the state of their collector."""

    def __init__(self) -> None:
        self.repeatable = False
        self._why = "the run has not begun"  # reason why a resume begins new episodes, or empty
        self._rollout: VectorRollout | None = None
        self._loaded: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        """Return the collector's state; before :meth:`begin`, the loaded one."""
        return self._loaded if self._rollout is None else self._rollout.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Store the state for :meth:`begin`."""
        self._loaded = dict(state)

    @property
    def manifest(self) -> dict[str, str]:
        """Manifest entries: whether episodes can be replayed, and whether a resume replays them."""
        return {
            "repeatable": "yes" if self.repeatable else "no",
            "resume": "anew" if self._why else "exact",
        }

    def check_repeatable(self, copies: VectorGymEnv, say: Callable[[str], None]) -> None:
        """Check whether episodes can be replayed; if so, start to record them."""
        self._why = copies.keep_episodes(say)
        self.repeatable = not self._why

    def begin(
        self,
        iteration: int,
        rollout: VectorRollout | TorchRLRollout,
        reseed: Callable[[], None],
        say: Callable[[str], None],
    ) -> None:
        """Restore the loaded state in a new collector.

        If restoring fails, ``reseed`` seeds new episodes. ``say`` gets a line if this resume begins
        new episodes, or else if a later resume will.
        """
        loaded, self._loaded = self._loaded, {}
        if isinstance(rollout, VectorRollout):
            self._rollout = rollout
        else:
            self._why = self._why or "collector=torchrl saves no episodes; collector=vector does"
        if self._rollout is not None and "episodes" in loaded:
            why = _go_on(self._rollout, loaded, reseed)
            if why:  # the failed replay overrides the result of the test before the run
                self.repeatable, self._why = False, why
        else:
            why = self._why or "the checkpoint has no episodes, or one was too long to save"
        if iteration > 0 and why:
            say(f"resume: this run begins new episodes: {why}")
        elif self._why:
            say(f"resume: a later resume will begin new episodes: {self._why}")


def _go_on(rollout: VectorRollout, loaded: Mapping[str, Any], reseed: Callable[[], None]) -> str:
    """Restore a state; return why this failed, else an empty string."""
    with generators_kept():  # an environment may draw from them
        try:
            rollout.load_state_dict(loaded)
        except Exception as error:  # a changed environment may raise anything
            reseed()
            rollout.restart()
            return f"{type(error).__name__}: {first_line(error)}"
    return ""
