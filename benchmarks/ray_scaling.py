"""What ``collector=ray`` costs and saves on this machine, against the local collector.

    python -m benchmarks.ray_scaling            # some minutes; prints the tables of docs/scaling.md
    python -m benchmarks.ray_scaling --rounds 3 --env pendulum

One rollout of each contender in turn (A B C A B C), wall seconds, medians over the rounds. The
transfers are timed alone: the weights to a worker that does nothing with them, its part of a batch
back from a worker that has it already, and the joining of the parts.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import ray
import torch

from klrl.__main__ import compose
from klrl.base.ray_start import start_ray
from klrl.config import Config, RayCollectorConfig
from klrl.config.checks import to_config
from klrl.control.env import make_env
from klrl.control.ray_rollout import RayRollout, join, to_arrays, weights_of
from klrl.control.vector import VectorRollout
from klrl.train.loop import Training

WORKERS = (1, 2)
SHAPES = {"pendulum": (64, 64), "half_cheetah": (16, 256)}


def seconds(act: Callable[[], Any]) -> float:
    """Wall seconds of a call."""
    start = time.perf_counter()
    act()
    return time.perf_counter() - start


def cpu_seconds(rollout: Any) -> float:
    """CPU time so far of this process and of a rollout's workers."""
    workers = rollout._collector.remote_collectors if isinstance(rollout, RayRollout) else []
    calls = [worker.__ray_call__.remote(lambda _: time.process_time()) for worker in workers]
    theirs = sum(ray.get(calls)) if calls else 0.0
    return time.process_time() + theirs


def config_of(env: str, update: str) -> Config:
    copies, steps = SHAPES[env]
    words = [f"env={env}", f"env.num_envs={copies}", f"collector.steps={steps}", "logger=none"]
    config = to_config(compose([*words, "device=cpu", f"learner.compile={update}"]))
    assert isinstance(config, Config)
    return config


def make_ray(config: Config, experiment: Training, workers: int) -> RayRollout:
    collector = RayCollectorConfig(config.collector.steps, workers, cpus_per_worker=1, name="ray")
    return RayRollout(collector, config.env, experiment.parts.agent, torch.device("cpu"), seed=0)


def learn(experiment: Training, batch: Any) -> None:
    """All of an iteration but the rollout."""
    experiment.parts.charge_kl(batch)
    experiment.parts.estimate_advantage(batch)
    experiment.learn(batch)


def transfers(rollout: RayRollout, experiment: Training, rounds: int) -> dict[str, float]:
    """Seconds and bytes per rollout with this rollout's number of workers."""
    workers = rollout._collector.remote_collectors
    weights = weights_of(experiment.parts.agent)

    def keep(worker: Any, sent: Any) -> None:
        worker.kept = to_arrays(worker._rollout.collect())

    def send() -> None:
        sent = ray.put(weights_of(experiment.parts.agent))
        ray.get([w.__ray_call__.remote(lambda _, given: None, sent) for w in workers])

    def fetch() -> list[Any]:
        return ray.get([w.__ray_call__.remote(lambda worker: worker.kept) for w in workers])

    ray.get([w.__ray_call__.remote(keep, None) for w in workers])
    parts = fetch()
    send()
    return {
        "weights_bytes": sum(a.nbytes for a in weights.values()),
        "weights_s": statistics.median(seconds(send) for _ in range(rounds)),
        "batch_bytes": sum(a.nbytes for part in parts for a in part.values()),
        "batch_s": statistics.median(seconds(fetch) for _ in range(rounds)),
        "join_s": statistics.median(seconds(lambda: join(parts)) for _ in range(rounds)),
    }


def measure(env: str, rounds: int, update: str) -> None:
    config = config_of(env, update)
    experiment = Training(config)
    local = VectorRollout(
        make_env(config.env, seed=0),
        experiment.parts.agent,
        config.collector.steps,
        torch.device("cpu"),
    )
    started = dict.fromkeys(WORKERS, 0.0)
    contenders: dict[str, Any] = {"one process": local}
    for workers in WORKERS:
        begin = time.perf_counter()
        contenders[f"{workers} Ray workers"] = make_ray(config, experiment, workers)
        contenders[f"{workers} Ray workers"].collect()
        started[workers] = time.perf_counter() - begin
    batch = local.collect()
    learn(experiment, batch.clone())  # compiles
    walls: dict[str, list[float]] = {name: [] for name in [*contenders, "update"]}
    cpus: dict[str, list[float]] = {name: [] for name in walls}
    for _ in range(rounds):
        acts = {name: (rollout, rollout.collect) for name, rollout in contenders.items()}
        acts["update"] = (local, partial(learn, experiment, local.collect()))
        for name, (rollout, act) in acts.items():
            before = cpu_seconds(rollout)
            walls[name].append(seconds(act))
            cpus[name].append(cpu_seconds(rollout) - before)
    report(config, walls, cpus, started)
    for workers in WORKERS:
        rollout = contenders[f"{workers} Ray workers"]
        print_transfers(workers, transfers(rollout, experiment, rounds))
    for rollout in reversed(contenders.values()):
        rollout.close()


def report(
    config: Config,
    walls: dict[str, list[float]],
    cpus: dict[str, list[float]],
    started: dict[int, float],
) -> None:
    frames = config.frames_per_iteration
    alone = statistics.median(walls["one process"])
    shape = f"{config.env.num_envs} x {config.collector.steps}"
    print(f"\n{config.env.id}, {shape} = {frames} frames per rollout")
    print("| | wall, us per frame | quartiles | CPU, us per frame | x one process |")
    print("|---|---|---|---|---|")
    for name, found in walls.items():
        low, middle, high = statistics.quantiles(found, n=4)
        ratio = f"{alone / middle:.2f}" if name != "update" else ""
        print(
            f"| {name} | {middle / frames * 1e6:.1f} | "
            f"{low / frames * 1e6:.1f} .. {high / frames * 1e6:.1f} | "
            f"{statistics.median(cpus[name]) / frames * 1e6:.1f} | {ratio} |"
        )
    print("start to the first rollout:", {w: f"{s:.1f} s" for w, s in started.items()})


def print_transfers(workers: int, found: dict[str, float]) -> None:
    print(
        f"{workers} workers: weights {found['weights_bytes'] / 1e3:.0f} kB "
        f"{found['weights_s'] * 1e3:.1f} ms, batch {found['batch_bytes'] / 1e3:.0f} kB "
        f"{found['batch_s'] * 1e3:.1f} ms, joined in {found['join_s'] * 1e3:.1f} ms"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--env", choices=tuple(SHAPES), action="append")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--update", default="jit", help="learner.compile of the update's figure")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{os.cpu_count()} cores, load average at the start {os.getloadavg()[0]:.1f}")
    start_ray(num_cpus=sum(WORKERS), log_to_driver=False, logging_level="ERROR")
    for env in arguments.env or SHAPES:
        measure(env, arguments.rounds, arguments.update)
    print(f"load average at the end {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
