"""Every pair of settings in few jobs: a covering set of env x actor x KL x loss x collector."""

from collections.abc import Callable, Mapping
from itertools import combinations, product
from typing import Any

TOYS = "tests.control.toys:klrl-test"
#: Of each space: the words that make its environment, and the actors that serve it.
ENVS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "vector": ("env.id=Pendulum-v1", ("mlp", "normal", "tanh_normal")),
    "box": (f"env.id={TOYS}/Copying-v0 env.kwargs.action=box", ("mlp", "normal", "tanh_normal")),
    "from_five": (f"env.id={TOYS}/Copying-v0 env.kwargs.action=from_five", ("mlp", "categorical")),
    "multi_discrete": (f"env.id={TOYS}/Copying-v0", ("mlp", "categorical")),
    "multi_binary": (f"env.id={TOYS}/Copying-v0 env.kwargs.action=bits", ("mlp", "categorical")),
    "keys": (
        f"env.id={TOYS}/Keyed-v0 env.kwargs.image=false env.kwargs.as_tuple=true",
        ("mlp", "categorical"),
    ),
    "keys_image": (f"env.id={TOYS}/Keyed-v0", ("impala",)),
    "image": ("env.id=klrl.control.env.catch:klrl/Catch-v0", ("nature", "impala")),
    "mask": (f"env.id={TOYS}/Masked-v0", ("mlp", "categorical")),
    "info_mask": (
        f"env.id={TOYS}/Masked-v0 env.kwargs.where=info env.action_mask=info",
        ("mlp", "categorical"),
    ),
}
ACTORS = {
    **{name: f"actor={name}" for name in ("mlp", "normal", "tanh_normal", "categorical")},
    **{name: f"actor=cnn actor.arch={name}" for name in ("nature", "impala")},
}
KLS = {
    "none": "kl=none",
    "legacy": "kl=legacy kl.apply=step",
    "k1": "kl=retrieve",
    "exact": "kl=retrieve kl.placement=split kl.estimator=exact",
    "js": "kl=retrieve kl.placement=split kl.estimator=exact kl.divergence=js",
}
LOSSES = {name: f"loss={name}" for name in ("klpen", "klpen_held", "clip")}
LOSSES["trpo"] = "loss=trpo actor.share_trunk=false"
COLLECTORS = {"vector": "collector=vector", "torchrl": "collector=torchrl"}
FACTORS = (ENVS, ACTORS, KLS, LOSSES, COLLECTORS)

Job = tuple[str, ...]
Pair = tuple[tuple[int, str], tuple[int, str]]


def possible() -> list[Job]:
    """Every job whose actor serves its environment."""
    return [job for job in product(*FACTORS) if job[1] in ENVS[job[0]][1]]


def pairs(job: Job) -> set[Pair]:
    """What a job covers: two factors, each with its value."""
    return set(combinations(enumerate(job), 2))


def values(job: Job) -> set[tuple[int, str]]:
    """Each factor with its value."""
    return set(enumerate(job))


def covering(jobs: list[Job], of: Callable[[Job], set[Any]] = pairs) -> list[Job]:
    """Few of the jobs that have what all have between them: the one with most that is new first.

    Args:
        jobs: to choose from.
        of: what a job has; by default its pairs.
    """
    left = {each for job in jobs for each in of(job)}
    chosen = []
    while left:
        best = max(jobs, key=lambda job: len(of(job) & left))
        chosen.append(best)
        left -= of(best)
    return chosen


def words(job: Job) -> list[str]:
    """The overrides of a job."""
    env, actor, kl, loss, collector = job
    return (
        f"env=gym {ENVS[env][0]} {ACTORS[actor]} {KLS[kl]} {LOSSES[loss]} {COLLECTORS[collector]}"
    ).split()
