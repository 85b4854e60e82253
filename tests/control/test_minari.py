"""Data sets of Minari: the lines of docs/imitation.md read one that is made here."""

import re
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
from tensordict import TensorDict

from tests.conftest import QUICK
from tests.runs.commands import exits, rows_of, said

pytestmark = pytest.mark.integration
minari = pytest.importorskip("minari", reason="needs the extra test")
pytest.importorskip("h5py", reason="needs the extra test")

PAGE = Path(__file__).parents[2] / "docs" / "imitation.md"
LINES = re.compile(r"^    import minari\n(?:    .*\n|\n)*", re.MULTILINE)
CLONE = ("experiment=clone", *(word for word in QUICK if not word.startswith("collector")))
CLONE = (*CLONE, "collector.steps=32", "hydra.run.dir=run")


@pytest.fixture
def episodes(monkeypatch) -> list:
    """Four of Pendulum by a PD controller, stored as ``pendulum/pd-v0``."""
    from minari.data_collector.episode_buffer import EpisodeBuffer

    monkeypatch.setenv("MINARI_DATASETS_PATH", str(Path("minari").absolute()))
    env, found = gymnasium.make("Pendulum-v1", max_episode_steps=50), []
    for number in range(4):
        seen, actions, rewards, ended = [env.reset(seed=number)[0]], [], [], [False]
        while not ended[-1]:
            x, y, speed = seen[-1]
            actions.append(np.float32([np.clip(-2 * (np.arctan2(y, x) + 0.3 * speed), -2, 2)]))
            after, reward, _, truncated, _ = env.step(actions[-1])
            seen, rewards, ended = [*seen, after], [*rewards, reward], [*ended, truncated]
        found.append(
            EpisodeBuffer(
                id=number,
                observations=np.array(seen),
                actions=np.array(actions),
                rewards=rewards,
                terminations=[False] * len(rewards),
                truncations=ended[1:],
                infos={},
            )
        )
    about = ("algorithm_name", "author", "author_email", "code_permalink", "description")
    how = {**dict.fromkeys(about, "a test"), "env": env, "eval_env": env}
    minari.create_dataset_from_buffers("pendulum/pd-v0", found, **how)
    return found


def test_the_lines_of_the_page_read_every_frame(episodes) -> None:
    (block,) = LINES.findall(PAGE.read_text("utf-8"))
    lines = [line[4:] for line in block.splitlines()]
    assert len([line for line in lines if line]) <= 12
    exec("\n".join(lines), {})
    data = TensorDict.load_memmap("data")
    for i, episode in enumerate(episodes):
        frames = data[data["episode"] == i]
        for key, expected in (
            ("observation", episode.observations[:-1]),
            (("next", "observation"), episode.observations[1:]),
            ("action", episode.actions),
            (("next", "reward"), np.array(episode.rewards)[:, None]),
            (("next", "terminated"), np.array(episode.terminations)[:, None]),
            (("next", "truncated"), np.array(episode.truncations)[:, None]),
        ):
            np.testing.assert_array_equal(frames[key].numpy(), expected)
    assert exits(*CLONE, "data=data") == 0
    nll = [row["nll/held_out"] for row in rows_of(Path("run"))]
    assert nll[-1] < nll[0]


@pytest.mark.filterwarnings("ignore")
def test_the_zeros_of_torchrls_reader_are_refused(episodes, capsys) -> None:
    """TorchRL 0.14.1's fault: once this fails, docs/imitation.md can name its reader."""
    from torchrl.data.datasets import MinariExperienceReplay

    how = {"root": "torchrl", "load_from_local_minari": True}
    data = MinariExperienceReplay("pendulum/pd-v0", batch_size=8, **how)
    assert (data[:]["observation"] == torch.zeros(3)).all()
    code, _, error = said(capsys, *CLONE, "data=torchrl/pendulum/pd-v0")
    assert (code, error.count("\n")) == (2, 1)
    assert "its observation is the same in all 200 frames" in error
    assert not Path("run").exists()
