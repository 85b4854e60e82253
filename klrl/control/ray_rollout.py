"""``collector=ray``: rollouts from several processes or machines, through TorchRL's RayCollector.

RayCollector starts, places and ends the workers. Its loop and its weight transfer are not used,
because of three faults of TorchRL 0.14.1, which ``tests/control/test_ray_rollout.py`` watches: when
one worker dies the loop raises, drops the data of the others and ends; trajectory ids of two
workers are the same; and the weights go through a server that listens on every address.

Here each request carries the weights to play with, and each worker plays exactly one part of a
rollout. If it dies, its replacement plays that part with the same weights, and whatever the dead
worker may still send is ignored.
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
from klrl.control.rollout import RolloutContext

#: How often a worker is tried within one rollout before the run gives up.
ATTEMPTS = 3
IDS = ("collector", "traj_ids")


class RayRollout:
    """Rollouts of ``steps`` steps of every copy, split among the workers.

    Worker i plays N / W copies from copy i * N / W on, with the environment seeds that they have in
    one process, and draws its actions from its own random stream. All is a function of ``seed`` as
    long as no worker dies: a replacement starts new episodes with new seeds.

    Args:
        config: the collector group; W workers.
        env: the env group; ``num_envs`` copies in all, N.
        agent: the live policy, whose weights go with each request.
        device: of the batches; the workers are on CPUs.
        seed: of the run's environments and actions.
        say: takes a line about a worker that was replaced.

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
        self._replacements = [0] * config.workers
        #: Per worker, the start of its trajectory ids; moves when the worker is replaced.
        self._first_id = [0] * config.workers
        self._next_id = [0] * config.workers
        self._collector = self._make_collector()
        for worker in range(config.workers):
            self._add(worker)

    def collect(self) -> TensorDictBase:
        """The next rollout, [N, T].

        Raises:
            NonFiniteError: a step returned NaN or infinity.
            WorkerError: a worker died again and again.
        """
        weights = self._ray.put(weights_of(self._agent))
        requests = [self._request(worker, weights) for worker in range(self._config.workers)]
        parts = [self._part_of(i, request, weights) for i, request in enumerate(requests)]
        return join(parts).to(self._device)

    def close(self) -> None:
        """End the workers, and Ray if it was started here."""
        self._collector.shutdown()
        self._cluster.leave()

    # ------------------------------------------------------------------------------- workers

    def _make_collector(self) -> RayCollector:
        with warnings.catch_warnings():
            # The weights travel with the requests, so RayCollector is given no policy.
            warnings.filterwarnings("ignore", message=".*policy", category=UserWarning)
            # No workers yet: the constructor would wait for them, and if one fails, the half-built
            # object remains and starts Ray again when it is garbage-collected.
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
        copies = self._env.num_envs // self._config.workers
        seed, replacements = self._seed + worker * copies, self._replacements[worker]
        if replacements:
            seed = derived_seed(self._seed, f"replacement {worker}", replacements)
        return partial(make_env, self._env, seed=seed, num_envs=copies)

    def _arguments(self, worker: int) -> dict[str, Any]:
        agent = copy.deepcopy(self._agent)
        agent.modules.to("cpu")
        return {
            "agent": agent,
            "steps": self._config.steps,
            "seed": derived_seed(self._seed, f"worker {worker}", self._replacements[worker]),
            "threads": self._config.cpus_per_worker,
        }

    def _replace(self, worker: int) -> None:
        """Start a new worker in place of a lost one."""
        workers = self._collector.remote_collectors
        # The lost one may be alive behind a broken connection.
        self._ray.kill(workers[worker], no_restart=True)
        self._replacements[worker] += 1
        self._first_id[worker] = self._next_id[worker]
        self._add(worker)
        workers[worker] = workers.pop()

    # ------------------------------------------------------------------------------ rollouts

    def _request(self, worker: int, weights: Any) -> Any:
        return self._collector.remote_collectors[worker].play.remote(weights)

    def _part_of(self, worker: int, request: Any, weights: Any) -> Arrays:
        """The part that a worker, or its replacement, plays."""
        errors = self._ray.exceptions
        lost: Exception | None = None
        for _ in range(ATTEMPTS):
            if lost is not None:
                self._say(f"worker {worker} is lost: a new one plays its part of this rollout")
                self._replace(worker)
                request = self._request(worker, weights)
            try:
                return self._number(worker, self._ray.get(request))
            except (errors.RayActorError, errors.ObjectLostError) as error:
                lost = error
            except errors.RayTaskError as error:
                raise error.cause from error
        raise WorkerError(
            f"collector=ray: worker {worker} was lost {ATTEMPTS} times in one rollout; "
            f"the last time: {last_line(lost)}"
        )

    def _number(self, worker: int, part: Arrays) -> Arrays:
        """Make trajectory ids unique among the workers and their replacements."""
        ids = part[IDS] + self._first_id[worker]
        self._next_id[worker] = max(self._next_id[worker], int(ids.max()) + 1)
        return {**part, IDS: ids * np.int64(self._config.workers) + worker}


def ray_rollout(context: RolloutContext) -> RayRollout:
    """``collector=ray``."""
    collector: Any = context.config.collector
    return RayRollout(
        collector,
        context.config.env,
        context.agent,
        context.device,
        context.seed,
        context.say,
    )
