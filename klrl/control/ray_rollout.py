"""``collector=ray``: rollouts from several processes or machines, actors of a Ray cluster.

TorchRL's RayCollector is not used, because of three faults of TorchRL 0.14.1, which
``tests/control/test_ray_rollout.py`` watches: when one worker dies, the loop fails and drops the
data of the others; trajectory ids of two workers are equal; and the weights go through a server
that listens on every address.

Here each request includes the policy's weights, and each worker plays exactly one part of a
rollout. If a worker dies, its replacement plays the part with the same weights, and any later
result of the dead worker is ignored.
"""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
import ray
import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.envs import TransformedEnv

from klrl.base.errors import WorkerError, last_line
from klrl.base.ray_start import HEADLESS, Shortage, headless, machines, quiet_ray, room, wait
from klrl.base.seeds import derived_seed, seed_generators
from klrl.config import RayCollectorConfig
from klrl.control.actor import Agent
from klrl.control.env import make_env
from klrl.control.rollout import RolloutContext
from klrl.control.vector import VectorRollout

#: A rollout or a policy in transit: plain arrays, which Ray passes without a copy.
Arrays = dict[str | tuple[str, ...], np.ndarray]

#: Attempts per worker within one rollout before the run fails.
ATTEMPTS = 3
#: Seconds between two counts of the cluster's machines.
_LOOK = 2.0
IDS = ("collector", "traj_ids")


class RayRollout:
    """``collector=ray``: rollouts of ``steps`` steps of every copy, split among W workers.

    Worker i plays N / W copies from copy i * N / W on, with the same environment seeds as in one
    process, and draws actions from its own random stream. Rollouts are a function of ``seed`` until
    a worker dies: its replacement starts new episodes with new seeds, and ``say`` reports this.
    """

    def __init__(self, context: RolloutContext) -> None:
        config = context.config.collector
        assert isinstance(config, RayCollectorConfig)
        self._config, self._env, self._agent = config, context.config.env, context.agent
        self._device, self._seed, self._say = context.device, context.seed, context.say
        self._cluster = Cluster(config.workers, config.cpus_per_worker)
        self._ray = self._cluster.ray
        self._shortage = Shortage(config.cpus_timeout, context.say)
        self._headless = Shortage(min(config.cpus_timeout, HEADLESS), context.say)
        self._looked = time.monotonic()
        #: The machines that were alive when a worker was last lost.
        self._machines = machines(self._ray)
        self._replacements = [0] * config.workers
        #: The first trajectory id of each worker; increased when the worker is replaced.
        self._first_id = [0] * config.workers
        self._next_id = [0] * config.workers
        self._workers = [self._start(worker) for worker in range(config.workers)]

    def collect(self) -> TensorDictBase:
        """The next rollout, [N, T]."""
        weights = self._ray.put(weights_of(self._agent))
        requests = [self._request(worker, weights) for worker in range(self._config.workers)]
        parts = [self._part_of(i, request, weights) for i, request in enumerate(requests)]
        return join(parts).to(self._device)

    def close(self) -> None:
        """End the workers, and Ray if it was started here."""
        for worker in self._workers:
            self._ray.kill(worker)
        self._cluster.leave()

    # ------------------------------------------------------------------------------- workers

    def _start(self, worker: int) -> Any:
        """Start a worker, or its replacement; nothing waits for it."""
        config, replacements = self._config, self._replacements[worker]
        copies = self._env.num_envs // config.workers
        seed = self._seed + worker * copies
        if replacements:
            seed = derived_seed(self._seed, f"replacement {worker}", replacements)
        agent = copy.deepcopy(self._agent).to(torch.device("cpu"))
        remote = self._ray.remote(num_cpus=config.cpus_per_worker, num_gpus=0)(RolloutWorker)
        return remote.remote(
            partial(make_env, self._env, seed=seed, num_envs=copies),
            agent,
            config.steps,
            seed=derived_seed(self._seed, f"worker {worker}", replacements),
            threads=config.cpus_per_worker,
        )

    def _replace(self, worker: int) -> None:
        """Start a new worker in place of a lost one."""
        # The lost worker may still be alive behind a broken connection.
        self._ray.kill(self._workers[worker], no_restart=True)
        self._replacements[worker] += 1
        self._first_id[worker] = self._next_id[worker]
        self._workers[worker] = self._start(worker)

    # ------------------------------------------------------------------------------ rollouts

    def _request(self, worker: int, weights: object) -> Any:
        return self._workers[worker].play.remote(weights)

    def _part_of(self, worker: int, request: object, weights: object) -> Arrays:
        """Wait for the part of a worker or its replacement."""
        errors, losses = self._ray.exceptions, 0
        while True:
            try:
                return self._number(worker, self._answer(request))
            except (errors.RayActorError, errors.ObjectLostError) as error:
                lost: Exception = error
            except errors.RayTaskError as error:
                raise error.cause from error
            # Ray may place workers on a machine that is just lost; those attempts do not count.
            before, self._machines = self._machines, machines(self._ray)
            counts = losses == 0 or self._machines >= before
            losses += counts
            if losses == ATTEMPTS:
                raise WorkerError(
                    f"collector=ray: worker {worker} was lost {ATTEMPTS} times in one rollout; "
                    f"the last time: {last_line(lost)}"
                )
            if counts:
                self._say(f"worker {worker} is lost: a new one plays its part of this rollout")
            self._replace(worker)
            request = self._request(worker, weights)

    def _answer(self, request: object) -> Arrays:
        """Wait for a part, but only for a limited time for CPUs that the cluster has lost."""
        while not wait(self._ray, [request], _LOOK):
            self._look()
        if time.monotonic() - self._looked > _LOOK:
            self._look()
        answer: Arrays = self._ray.get(request)
        return answer

    def _look(self) -> None:
        """Count the machines; fail if there were too few for too long."""
        self._looked = time.monotonic()
        away = headless(self._ray)
        missing = None if away else self._cluster.missing()
        if self._headless.lasts(away) or self._shortage.lasts(missing):
            raise WorkerError(
                f"collector=ray: {away or missing}; resume=RUN goes on when that has changed, or "
                "on another cluster"
            )

    def _number(self, worker: int, part: Arrays) -> Arrays:
        """Make trajectory ids unique among the workers and their replacements."""
        ids = part[IDS] + self._first_id[worker]
        self._next_id[worker] = max(self._next_id[worker], int(ids.max()) + 1)
        return {**part, IDS: ids * np.int64(self._config.workers) + worker}


# ------------------------------------------------------------------------------------------ worker


class RolloutWorker:
    """A local collector in a Ray process; it plays with the weights of each request."""

    def __init__(
        self,
        make_env: Callable[[], TransformedEnv],
        agent: Agent,
        steps: int,
        *,
        seed: int,
        threads: int,
    ) -> None:
        torch.set_num_threads(threads)
        seed_generators(seed)
        self._agent = agent
        self._rollout = VectorRollout(make_env(), agent, steps, torch.device("cpu"))

    def play(self, weights: Arrays) -> Arrays:
        """Collect a rollout [N, T] with these weights, continuing the last rollout's episodes."""
        state = {name: torch.tensor(value) for name, value in weights.items()}
        self._agent.actor.load_state_dict(state)
        return to_arrays(self._rollout.collect())


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


# --------------------------------------------------------------------------------------------- Ray


class Cluster:
    """A Ray cluster: the running one, the one at ``RAY_ADDRESS``, or a new one on loopback."""

    def __init__(self, workers: int, cpus: int) -> None:
        self.ray = ray
        self._workers, self._cpus = workers, cpus
        self._entered = ExitStack()
        if not ray.is_initialized():
            options: dict[str, Any] = {}
            if "RAY_ADDRESS" not in os.environ:
                options["num_cpus"] = workers * cpus
            self._entered.enter_context(quiet_ray("collector=ray", **options))
        if (missing := self.missing()) is not None:
            self.leave()
            raise WorkerError(
                f"collector=ray: {missing}; lower collector.workers or collector.cpus_per_worker, "
                "or add machines"
            )

    def missing(self) -> str | None:
        """The resources that the living machines lack for all workers; None if they suffice.

        Resources that other jobs use count as available. A worker must fit on one machine.
        """
        lacking = self._workers - room(self.ray, self._cpus)
        if lacking <= 0:
            return None
        asked, lost = self._workers * self._cpus, lacking * self._cpus
        return f"the Ray cluster lacks {lost} of the {asked} CPUs that the workers ask for"

    def leave(self) -> None:
        """Stop or leave Ray if it was started or joined here."""
        self._entered.close()
