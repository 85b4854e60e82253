"""``klrl evaluate RUN --video``: the frames are the environment's, the episode an evaluation's."""

import json
import threading
from pathlib import Path

import gymnasium
import imageio.v2 as imageio
import numpy as np
import pytest
from gymnasium.envs.classic_control import PendulumEnv
from PIL import Image, ImageSequence

from klrl.base.errors import ConfigError
from klrl.runs.video import filming
from klrl.train.evaluate import evaluate_run
from klrl.train.film import check_film, film_run
from tests.conftest import QUICK
from tests.runs.commands import exits

pytest.importorskip("imageio_ffmpeg", reason="needs klrl[video]")
written = pytest.importorskip(
    "tensorboard.backend.event_processing.event_accumulator", reason="needs klrl[tensorboard]"
)

#: imageio's reader, which klrl does not use, leaves ffmpeg's pipes open.
pytestmark = pytest.mark.filterwarnings(
    "ignore:unclosed file:ResourceWarning",
    "ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning",
)

STEPS = 12


class Drawn(PendulumEnv):
    """Pendulum, drawn as a grey that grows with the step: no window, no OpenGL."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 40}  # noqa: RUF012
    shown = 0

    def reset(self, *, seed=None, options=None):
        self.shown = 0
        return super().reset(seed=seed, options=options)

    def step(self, action):
        self.shown += 1
        return super().step(action)

    def render(self):
        # MuJoCo's OpenGL gives black pictures in any thread but that of its first picture.
        assert threading.current_thread() is threading.main_thread()
        return np.full((30, 41, 3), 20 * self.shown, np.uint8)


class Undrawn(PendulumEnv):
    """Has no pictures."""

    metadata = {"render_modes": []}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()


for name, kind in (("Drawn", Drawn), ("Undrawn", Undrawn)):
    gymnasium.register(f"klrl-{name}-v0", kind, max_episode_steps=STEPS)


def trained(name: str, *words: str) -> Path:
    words = (*(word for word in QUICK if word != "logger=none"), *words, "hydra.run.dir=run")
    assert exits(*words, f"env.id=klrl-{name}-v0") == 0
    return Path("run")


def test_a_camera_writes_every_picture_and_a_gif_at_20_a_second(tmp_path) -> None:
    pictures = [np.full((30, 41, 3), 10 * i, np.uint8) for i in range(STEPS)]
    with filming(tmp_path / "videos", "a") as camera:
        camera.start(40)
        for picture in pictures:
            camera.take(picture)
    film = imageio.mimread(tmp_path / "videos" / "a.mp4")
    assert len(film) == STEPS
    assert film[0].shape == (30, 42, 3)  # an even width
    for shot, picture in zip(film, pictures, strict=True):
        assert abs(float(shot.mean()) - float(picture.mean())) < 4  # encoded with a loss
    with Image.open(tmp_path / "videos" / "a.gif") as gif:
        shown = [
            (np.asarray(f.convert("RGB")), f.info["duration"]) for f in ImageSequence.Iterator(gif)
        ]
    assert [duration for _, duration in shown] == [50] * (STEPS // 2)
    assert all((shot == pictures[2 * i]).all() for i, (shot, _) in enumerate(shown))


@pytest.mark.integration
def test_the_film_is_the_first_episode_of_the_evaluation_and_goes_to_tensorboard(capsys) -> None:
    run = trained("Drawn", "logger=tensorboard", "env.step_timeout=60")
    filmed = film_run(run, which="last")
    assert filmed.film.steps == STEPS
    assert filmed.film.score == evaluate_run(run, episodes=3, which="last").returns[0]
    assert len(imageio.mimread(filmed.video.mp4)) == STEPS + 1
    read = written.EventAccumulator(str(run / "tensorboard"), {"images": 0})
    read.Reload()
    (image,) = read.Images("video/last")
    assert image.encoded_image_string == filmed.video.gif.read_bytes()
    assert (image.width, image.height, image.step) == (41, 30, 128)
    capsys.readouterr()
    assert exits("evaluate", "run", "--video", "--episodes", "1", "--json") == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["video"] == str(Path("run/videos/last.mp4").absolute())
    assert "filming an episode" in printed.err, "which may take a minute"
    assert exits("evaluate", "run", "--video", "--episodes", "1", "--sampled", "--seed", "2") == 0
    assert "run/videos/last,sampled,seed=2.mp4 and .gif, 12 steps" in capsys.readouterr().out


@pytest.mark.integration
def test_what_cannot_be_filmed_is_told_in_a_line(capsys, monkeypatch) -> None:
    trained("Undrawn", "logger=none")
    capsys.readouterr()
    assert exits("evaluate", "run", "--video", "--episodes", "1") == 2
    told = capsys.readouterr().err
    assert "--video: klrl-Undrawn-v0 cannot be rendered with render_mode=rgb_array: " in told
    assert told.count("\n") == 1
    monkeypatch.setattr("klrl.runs.machine.importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"--video: the package imageio .* 'klrl\[video\]'"):
        check_film("run")
