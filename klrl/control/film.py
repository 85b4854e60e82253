"""An episode of a trained policy, drawn by its environment."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from klrl.base.errors import ConfigError, EnvError, in_one_line
from klrl.base.seeds import derived_seed
from klrl.base.text import warn
from klrl.config import Config, CustomEnvConfig, EnvConfig
from klrl.control.acting import make_acting
from klrl.control.copies import VectorGymEnv
from klrl.control.env import make_copies
from klrl.control.evaluate import MAX_STEPS, Noise, play
from klrl.control.load import trained_agent
from klrl.runs.video import Camera, Film
from klrl.train.evaluate import Starts

#: The only mode of Gymnasium's that returns one picture at a time.
_MODE = "rgb_array"


def film_trained(
    folder: Path,
    config: Config,
    camera: Camera,
    *,
    starts: Starts,
    sampled: bool,
    which: str,
    device: torch.device,
) -> Film:
    """Film one episode: the first of those that an evaluation from these start states plays."""
    env = _drawn(config.env)
    try:
        acting = make_acting(trained_agent(folder, which, str(device)), device)
        noise = Noise(derived_seed(starts.seed, f"{starts.use}, film"), 1) if sampled else None
        limit = env.longest_episode or MAX_STEPS
        warn(f"filming an episode of at most {limit:,} steps")
        camera.start(env.pictures_per_second)
        scores, steps = play(
            env, acting, starts.seeds(1), limit, noise, lambda: camera.take(env.picture())
        )
    finally:
        env.close()
    return Film(sum(steps), scores.returns[0] if scores.returns else None)


def _drawn(config: EnvConfig) -> VectorGymEnv:
    """A copy that draws, which has drawn once."""
    mode = {"render_mode": _MODE}
    if isinstance(config, CustomEnvConfig):
        drawing: EnvConfig = replace(config, args={**config.args, **mode})
    else:
        drawing = replace(config, kwargs={**config.kwargs, **mode})
    env = None
    try:
        env = make_copies(drawing, seed=0, num_envs=1)
        env.reset_native()
        env.picture()
    except Exception as error:  # Gymnasium, its simulators and OpenGL raise what they like
        if env is not None:
            env.close()
        told = str(error) if isinstance(error, EnvError) else in_one_line(error)
        raise ConfigError(
            f"--video: {config.id} cannot be drawn with render_mode={_MODE}: {told}; see "
            "docs/runs.md, Videos"
        ) from error
    return env
