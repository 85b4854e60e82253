"""The worker process of ``collector=ray``: a local collector; requests bring its weights."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.collectors import BaseCollector
from torchrl.envs import TransformedEnv

from klrl.control.actor import Agent
from klrl.control.rollout import native_rollout

#: A rollout or a policy in transit: plain arrays, which Ray passes without a copy.
Arrays = dict[Any, np.ndarray]


class RolloutWorker(BaseCollector):
    """Plays its copies with the weights that each request brings.

    Args:
        create_env_fn: makes the environment of this worker; in a list, as RayCollector passes it.
        agent: the policy, on the CPU; each request replaces its weights.
        steps: T.
        seed: of torch's generator in this process, which draws the actions.
        threads: of torch.
        **_: RayCollector's other arguments for collectors, unused here.
    """

    def __init__(
        self,
        create_env_fn: Sequence[Callable[[], TransformedEnv]],
        *,
        agent: Agent,
        steps: int,
        seed: int,
        threads: int,
        **_: Any,
    ) -> None:
        super().__init__()
        torch.set_num_threads(threads)
        torch.manual_seed(seed)
        self._agent = agent
        (make_env,) = create_env_fn
        self._rollout = native_rollout(make_env(), agent, steps, torch.device("cpu"))

    def __bool__(self) -> bool:
        """True: Ray tests it after a failure, and TorchRL's ``__len__`` fails without frames."""
        return True

    def play(self, weights: Arrays) -> Arrays:
        """One rollout [N, T] of the policy with these weights, from where the last one ended.

        Raises:
            NonFiniteError: a step returned NaN or infinity.
        """
        state = {name: torch.tensor(value) for name, value in weights.items()}
        self._agent.actor.load_state_dict(state)
        return to_arrays(self._rollout.collect())

    def iterator(self) -> Iterator[TensorDictBase]:
        """Rollouts with the current weights, for RayCollector's own loop."""
        while True:
            yield self._rollout.collect()

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seed the actions; the environment was seeded when it was made."""
        torch.manual_seed(seed)
        return seed if static_seed else seed + 1

    def state_dict(self) -> OrderedDict[str, Any]:
        """Empty: a resumed run starts new episodes."""
        return OrderedDict()

    def load_state_dict(self, state_dict: Mapping[str, Any], **_: Any) -> None:
        """Load nothing: :meth:`state_dict` is empty."""

    def shutdown(self, *_: Any, **__: Any) -> None:
        """Close the environment."""
        self._rollout.close()


def weights_of(agent: Agent) -> Arrays:
    """The policy's parameters and observation statistics, on the CPU."""
    return {name: value.cpu().numpy() for name, value in agent.actor.state_dict().items()}


def to_arrays(batch: TensorDictBase) -> Arrays:
    """A batch as arrays by key, nested keys as tuples."""
    return {key: batch.get(key).numpy() for key in batch.keys(True, True)}


def join(parts: list[Arrays]) -> TensorDict:
    """Concatenate the workers' rollouts [n, T] to [N, T]."""
    joined = {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}
    batch = TensorDict({}, joined["action"].shape[:2], names=[None, "time"])
    for key, value in joined.items():
        batch.set(key, torch.from_numpy(value))
    return batch
