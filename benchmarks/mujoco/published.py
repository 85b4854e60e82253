"""Published returns of PPO, and of TRPO beside it, on the MuJoCo tasks at one million frames.

Only what was read. Looked up and left out: Stable-Baselines3's documentation (PyBullet only),
Spinning Up's own page (curves to 3M), PFRL and Henderson et al. 2018 as it quotes them (2M),
SLM-Lab's v5 table (4M to 10M), CleanRL's RPO page (8M), TorchRL's sota-implementations (no
figures); of Andrychowicz et al. 2021 only the abstract could be read. The PPO paper's adaptive KL
penalty has no returns per task: its Table 1, as quoted, gives .74 at d_targ = .01 against .82 for
clip = .2, normalised over all tasks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

FRAMES = 1_000_000
#: Preset, as in ``env=hopper`` -> Gymnasium's name without its version.
NAMES = {
    "half_cheetah": "HalfCheetah",
    "hopper": "Hopper",
    "walker2d": "Walker2d",
    "ant": "Ant",
    "swimmer": "Swimmer",
    "reacher": "Reacher",
    "inverted_pendulum": "InvertedPendulum",
    "inverted_double_pendulum": "InvertedDoublePendulum",
    "humanoid": "Humanoid",
}
#: What a return on v5 does not share with the versions before, from Gymnasium's documentation.
V5 = {
    "hopper": "no healthy_reward on the step that ends the episode",
    "walker2d": "no healthy_reward on the last step; equal friction of both feet",
    "ant": "no healthy_reward on the last step; contact forces observed (klrl's preset leaves them "
    "out), their cost in the reward",
    "reacher": "the distance is that after the step, not before",
    "inverted_pendulum": "no reward on the step that ends the episode",
    "inverted_double_pendulum": "no healthy_reward on the step that ends the episode",
    "humanoid": "no healthy_reward on the last step; the contact cost of v3, which v4 had dropped",
}


@dataclass(frozen=True)
class Source:
    """A published table.

    Attributes:
        name: for a column's head.
        method: PPO or TRPO.
        address: where it was read.
        versions: of the environments.
        seeds: how many runs stand behind a number; None: not said.
        tuning: "per task" or "one setting".
        measured: how a return was measured.
        spread: what the second number of ``returns`` is; "" for none.
        returns: preset -> (return, spread or None).
        frames: of training.
        approximate: read off curves, by whom ``measured`` says.
    """

    name: str
    method: str
    address: str
    versions: str
    seeds: int | None
    tuning: str
    measured: str
    spread: str
    returns: Mapping[str, tuple[float, float | None]]
    frames: int = FRAMES
    approximate: bool = False


def _plain(**returns: float) -> dict[str, tuple[float, float | None]]:
    return {task: (value, None) for task, value in returns.items()}


_TIANSHOU = "https://github.com/thu-ml/tianshou/blob/1da9b86c/examples/mujoco/README.md"
_ZOO = "https://github.com/DLR-RM/rl-baselines3-zoo/blob/0088472b/benchmark.md"
_BASELINES = (
    "https://github.com/openai/baselines/blob/e1fc1460/benchmarks_mujoco1M.htm; "
    "version and measure from its issue 559"
)
_ENGSTROM = "https://arxiv.org/abs/2005.12729"
_V3 = "v3; Reacher and both pendulums v2"
_OFF_CURVES = "training returns, read off curves by Tianshou's README"
_BEST_MEAN = (
    "highest point up to 1M frames of the curve over seeds; each of its points 10 test episodes a "
    "seed, actions as Tianshou's default has it: sampled. By its scripts the runs are of 3M "
    "frames, over which the learning rate falls to 0"
)

SOURCES = (
    Source(
        # By hyperparams/ppo.yml the defaults of Stable-Baselines3 on Ant, and on Swimmer with
        # gamma = .9999; nearly every number tuned on the other three.
        "rl-baselines3-zoo",
        "PPO",
        _ZOO,
        "v3",
        1,
        "per task",
        "one trained model, about 150 deterministic episodes",
        "standard deviation over episodes",
        {
            "half_cheetah": (5819.099, 663.530),
            "hopper": (2410.435, 10.026),
            "walker2d": (3478.798, 821.708),
            "ant": (1327.158, 451.577),
            "swimmer": (281.561, 9.671),
        },
    ),
    Source(
        "Tianshou",
        "PPO",
        _TIANSHOU,
        _V3,
        10,
        "one setting",
        _BEST_MEAN,
        "standard deviation over seeds",
        {
            "half_cheetah": (5783.9, 1244.0),
            "hopper": (2609.3, 700.8),
            "walker2d": (3588.5, 756.6),
            "ant": (3258.4, 1079.3),
            "swimmer": (66.7, 99.1),
            "reacher": (-4.1, 0.3),
            "inverted_pendulum": (1000.0, 0.0),
            "inverted_double_pendulum": (9231.3, 270.4),
            "humanoid": (787.1, 193.5),
        },
    ),
    Source(
        "XuanCe",
        "PPO",
        "https://github.com/agi-brain/xuance/blob/44c5be66/docs/source/documents/benchmark/"
        "mujoco.rst; frames, version and measure, which the page leaves out, from its examples/ppo",
        "v4 by its scripts",
        None,
        "one setting",
        "by its script the best of 200 evaluations during training, 5 episodes each",
        "",
        _plain(
            half_cheetah=4628.4,
            hopper=3450.1,
            walker2d=4318.6,
            ant=2810.7,
            swimmer=108.9,
            reacher=-8.1,
            inverted_pendulum=1000.0,
            inverted_double_pendulum=9359.1,
            humanoid=705.5,
        ),
    ),
    Source(
        "CleanRL",
        "PPO",
        "https://github.com/vwxyzjn/cleanrl/blob/09f7a7f2/docs/benchmark/ppo_continuous_action.md",
        "v4",
        3,
        "one setting",
        "training returns",
        "as published, its kind not said",
        {
            "half_cheetah": (1442.64, 46.03),
            "hopper": (2382.86, 271.74),
            "walker2d": (2287.95, 571.78),
            "inverted_pendulum": (963.09, 22.20),
            "humanoid": (716.11, 49.08),
        },
    ),
    Source(
        "CleanRL, v2",
        "PPO",
        "https://github.com/vwxyzjn/cleanrl/pull/424, which removes the table from "
        "docs/rl-algorithms/ppo.md",
        "v2",
        3,
        "one setting",
        "training returns",
        "as published, its kind not said",
        {
            "half_cheetah": (1822.82, 928.11),
            "hopper": (2231.12, 656.72),
            "walker2d": (3050.09, 1136.21),
        },
    ),
    Source(
        "OpenAI Baselines by Huang et al. 2022",
        "PPO",
        "https://github.com/vwxyzjn/cleanrl/pull/424, which removes the table from "
        "docs/rl-algorithms/ppo.md; seeds and frames from "
        "vwxyzjn/ppo-implementation-details, scripts/baselines/mujoco.sh",
        "v2",
        3,
        "one setting",
        "training returns",
        "as published, its kind not said",
        {
            "half_cheetah": (2152.26, 1159.84),
            "hopper": (2518.95, 850.46),
            "walker2d": (3208.08, 1264.37),
        },
    ),
    Source(
        "OpenAI Baselines",
        "PPO",
        _BASELINES,
        "v2",
        6,
        "one setting",
        "training returns; over which part of the training is not said",
        "",
        _plain(
            half_cheetah=1668.58,
            hopper=2316.16,
            walker2d=3424.95,
            swimmer=111.19,
            reacher=-6.71,
            inverted_pendulum=809.43,
            inverted_double_pendulum=7102.91,
        ),
    ),
    Source(
        "Engstrom et al. 2020",
        "PPO",
        f"{_ENGSTROM}, Table 2 (read as quoted by others, three times alike); frames, learning "
        "rates and seeds from MadryLab/implementation-matters, src/MuJoCo.json and configs",
        "v2",
        80,
        "per task",
        "reward at the end of training; 80 agents or more",
        "half of the 95 % bootstrap interval",
        {
            "hopper": (2513, 120.5),
            "walker2d": (3292, 134.5),
            "humanoid": (806, 21.0),
        },
        frames=488 * 2048,
    ),
    Source(
        "Schulman et al. 2017",
        "PPO",
        f"https://arxiv.org/abs/1707.06347, Figure 3; {_TIANSHOU}",
        "not said",
        3,
        "one setting",
        _OFF_CURVES,
        "",
        _plain(
            half_cheetah=1800,
            hopper=2330,
            walker2d=3460,
            swimmer=108,
            reacher=-7,
            inverted_pendulum=1000,
            inverted_double_pendulum=8000,
        ),
        approximate=True,
    ),
    Source(
        "pytorch-a2c-ppo-acktr-gail",
        "PPO",
        f"https://github.com/ikostrikov/pytorch-a2c-ppo-acktr-gail; {_TIANSHOU}",
        "not said",
        None,
        "one setting",
        _OFF_CURVES,
        "",
        _plain(half_cheetah=3120, hopper=2300, walker2d=4000, reacher=-5),
        approximate=True,
    ),
    Source(
        "Spinning Up",
        "PPO",
        f"https://spinningup.openai.com/en/latest/spinningup/bench_ppo.html; {_TIANSHOU}",
        "v2",
        3,
        "one setting",
        _OFF_CURVES,
        "",
        _plain(half_cheetah=1670, hopper=1850, walker2d=1230, ant=650, swimmer=120),
        approximate=True,
    ),
    Source(
        "rl-baselines3-zoo, TRPO",
        "TRPO",
        _ZOO,
        "v3",
        1,
        "per task",
        "one trained model, about 150 deterministic episodes",
        "standard deviation over episodes",
        {
            "half_cheetah": (1785.476, 68.672),
            "hopper": (3618.386, 356.768),
            "walker2d": (4933.148, 1452.538),
            "ant": (4982.301, 663.761),
            "swimmer": (365.663, 2.087),
        },
    ),
    Source(
        "Tianshou, TRPO",
        "TRPO",
        _TIANSHOU,
        _V3,
        10,
        "one setting",
        _BEST_MEAN,
        "standard deviation over seeds",
        {
            "half_cheetah": (4471.2, 804.9),
            "hopper": (2046.0, 1037.9),
            "walker2d": (3826.7, 782.7),
            "ant": (2866.7, 707.9),
            "swimmer": (40.9, 19.6),
            "reacher": (-5.1, 0.8),
            "inverted_pendulum": (1000.0, 0.0),
            "inverted_double_pendulum": (8435.2, 1073.3),
            "humanoid": (810.1, 126.1),
        },
    ),
    Source(
        "OpenAI Baselines, TRPO",
        "TRPO",
        _BASELINES,
        "v2",
        6,
        "one setting",
        "training returns; over which part of the training is not said",
        "",
        _plain(
            half_cheetah=1289.7,
            hopper=1912.9,
            walker2d=2342.63,
            swimmer=94.96,
            reacher=-4.82,
            inverted_pendulum=905.1,
            inverted_double_pendulum=6731.63,
        ),
    ),
    Source(
        "Engstrom et al. 2020, TRPO",
        "TRPO",
        f"{_ENGSTROM}, Table 2, without PPO's code-level optimisations (read as quoted by others)",
        "v2",
        80,
        "per task",
        "reward at the end of training; 80 agents or more",
        "half of the 95 % bootstrap interval",
        {
            "hopper": (2043, 52.5),
            "walker2d": (2791, 82.0),
            "humanoid": (586, 10.0),
        },
        frames=488 * 2048,
    ),
)


def best(
    task: str, sources: Iterable[Source] = SOURCES, method: str = "PPO"
) -> tuple[float, Source]:
    """The highest published return and its source, the first of equal ones.

    Args:
        task: a preset.
        sources: which count, as in ``[s for s in SOURCES if s.seeds and not s.approximate]``.
        method: PPO or TRPO.

    Raises:
        ValueError: none of them has the task.
    """
    those = [source for source in sources if source.method == method and task in source.returns]
    if not those:
        raise ValueError(f"{task}: no published return of {method}")
    source = max(those, key=lambda source: source.returns[task][0])
    return source.returns[task][0], source
