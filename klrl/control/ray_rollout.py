"""``collector=ray``: rollouts from several processes or machines, through TorchRL's RayCollector.

RayCollector makes, places and ends the workers. Its loop and its weight transfer are not used, for
three faults of TorchRL 0.14.1, which ``tests/control/test_ray_rollout.py`` watches: when one worker
dies the loop raises, drops what the others played, and is over; trajectory ids of two workers are
the same; and the weights go through a server that listens on every address.

Here each request brings the weights that it is to be played with, and each worker owes exactly one
answer per rollout: what a dead one owed is played by its replacement, with the same weights, and
nothing that the dead one may still send is looked at.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from torchrl.collectors.distributed import RayCollector

from klrl.base.errors import WorkerError
from klrl.base.seeds import derived_seed
from klrl.config import EnvConfig, RayCollectorConfig
from klrl.control.actor import Agent
from klrl.control.env import make_env
from klrl.control.ray_cluster import Cluster, last_line
from klrl.control.ray_worker import Arrays, RolloutWorker, join, weights_of
from klrl.control.rollout import Asked

#: Deaths of one worker within one rollout that are taken for accidents.
ACCIDENTS = 3
IDS = ("collector", "traj_ids")


class RayRollout:
    """Rollouts of ``steps`` steps of every copy, split among the workers.

    Worker i plays copies i * N / W and following, with the environment seeds that they have in one
    process; each worker draws its actions from a stream of its own. All is a function of ``seed``,
    as long as no worker dies: a replacement starts new episodes with new seeds.

    Args:
        config: the collector group.
        env: the env group; ``num_envs`` copies in all, N.
        agent: the live policy, whose weights each request takes along.
        device: of the batches; the workers are on CPUs.
        seed: of the run's environments and actions.
        say: tells of a worker that was replaced.

    Raises:
        WorkerError: the cluster cannot be joined, or has too few CPUs.
    """

    def __init__(
        self,
        config: RayCollectorConfig,
        env: EnvConfig,
        agent: Agent,
        device: torch.device,
        seed: int,
        say: Callable[[str], None] = print,
    ) -> None:
        self._config, self._env, self._agent = config, env, agent
        self._device, self._seed, self._say = device, seed, say
        self._cluster = Cluster(config.workers * config.cpus_per_worker)
        self._ray = self._cluster.ray
        self._births = [0] * config.workers
        #: Per worker, what its trajectory ids start from; moves when it is replaced.
        self._first_id = [0] * config.workers
        self._next_id = [0] * config.workers
        self._collector = self._make()
        for worker in range(config.workers):
            self._add(worker)

    def collect(self) -> TensorDictBase:
        """The next rollout, [N, T].

        Raises:
            NonFiniteError: a step returned NaN or infinity.
            WorkerError: a worker died again and again.
        """
        weights = self._ray.put(weights_of(self._agent))
        asked = [self._ask(worker, weights) for worker in range(self._config.workers)]
        parts = [self._answer(worker, asked[worker], weights) for worker in range(len(asked))]
        return join(parts).to(self._device)

    def close(self) -> None:
        """End the workers, and Ray where it was started here."""
        self._collector.shutdown()
        self._cluster.leave()

    # ------------------------------------------------------------------------------- workers

    def _make(self) -> RayCollector:
        with warnings.catch_warnings():
            # The weights travel with the requests, so RayCollector is given no policy.
            warnings.filterwarnings("ignore", message=".*policy", category=UserWarning)
            # Without workers: those it makes in here it waits for, and where one fails it stays
            # behind half made, and starts Ray again when it is collected as garbage.
            return RayCollector(
                [],
                collector_class=RolloutWorker,
                frames_per_batch=self._env.num_envs * self._config.steps,
                weight_sync_schemes={},
            )

    def _add(self, worker: int) -> None:
        """Start a worker, as the last of RayCollector's list; nothing waits for it."""
        resources = {"num_cpus": self._config.cpus_per_worker, "num_gpus": 0}
        self._collector.add_collectors(
            [self._env_maker(worker)], 1, None, [self._arguments(worker)], [resources]
        )

    def _env_maker(self, worker: int) -> Callable[[], Any]:
        share = self._env.num_envs // self._config.workers
        seed, birth = self._seed + worker * share, self._births[worker]
        if birth:
            seed = derived_seed(self._seed, f"replacement {worker}", birth)
        return partial(make_env, self._env, seed=seed, num_envs=share)

    def _arguments(self, worker: int) -> dict[str, Any]:
        agent = copy.deepcopy(self._agent)
        agent.modules.to("cpu")
        return {
            "agent": agent,
            "steps": self._config.steps,
            "seed": derived_seed(self._seed, f"worker {worker}", self._births[worker]),
            "threads": self._config.cpus_per_worker,
        }

    def _replace(self, worker: int) -> None:
        """Put a new worker in the place of one that is lost."""
        workers = self._collector.remote_collectors
        # It may be alive behind a broken line.
        self._ray.kill(workers[worker], no_restart=True)
        self._births[worker] += 1
        self._first_id[worker] = self._next_id[worker]
        self._add(worker)
        workers[worker] = workers.pop()

    # ------------------------------------------------------------------------------ rollouts

    def _ask(self, worker: int, weights: Any) -> Any:
        return self._collector.remote_collectors[worker].play.remote(weights)

    def _answer(self, worker: int, asked: Any, weights: Any) -> Arrays:
        """The part of a worker, or of its replacement."""
        errors = self._ray.exceptions
        lost: Exception | None = None
        for _ in range(ACCIDENTS):
            if lost is not None:
                self._say(f"worker {worker} is lost: a new one plays its part of this rollout")
                self._replace(worker)
                asked = self._ask(worker, weights)
            try:
                return self._number(worker, self._ray.get(asked))
            except (errors.RayActorError, errors.ObjectLostError) as error:
                lost = error
            except errors.RayTaskError as error:
                raise error.cause from error
        raise WorkerError(
            f"collector=ray: worker {worker} was lost {ACCIDENTS} times in one rollout; "
            f"the last time: {last_line(lost)}"
        )

    def _number(self, worker: int, part: Arrays) -> Arrays:
        """Make trajectory ids unique among the workers and their replacements."""
        ids = part[IDS] + self._first_id[worker]
        self._next_id[worker] = max(self._next_id[worker], int(ids.max()) + 1)
        return {**part, IDS: ids * np.int64(self._config.workers) + worker}


def ray_rollout(asked: Asked) -> RayRollout:
    """``collector=ray``."""
    config: Any = asked.config.collector
    return RayRollout(config, asked.config.env, asked.agent, asked.device, asked.seed, asked.say)
