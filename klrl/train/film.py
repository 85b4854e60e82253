"""``klrl evaluate RUN --video``: film an episode, and log the film in the run's loggers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from klrl.base.errors import ConfigError, user_code
from klrl.config import JobConfig
from klrl.domains import Domain, domain_of
from klrl.runs.checkpoint import Counters, load_component
from klrl.runs.find import find_run
from klrl.runs.folder import RunFolder
from klrl.runs.guard import Guard
from klrl.runs.loggers import LoggedRun, Video, open_loggers
from klrl.runs.machine import device_of
from klrl.runs.resume import config_on_task, stored_config
from klrl.runs.video import Film, check_encoders, filming
from klrl.train.scores import EvaluationPlan, Size, Starts


@dataclass(frozen=True)
class Filmed:
    """A film of an episode, and its files."""

    video: Video
    film: Film
    domain: Domain

    @property
    def line(self) -> str:
        """The result as a line of text."""
        score = (
            "cut off" if self.film.score is None else f"{self.domain.score} {self.film.score:.5g}"
        )
        return f"video: {self.video.mp4} and .gif, {self.film.steps} steps, {score}"


def check_film(run: str | Path) -> None:
    """Refuse a run that cannot be filmed."""
    domain = domain_of(stored_config(find_run(str(run), "RUN")))
    if "film" not in domain.functions:
        raise ConfigError(
            f"--video: {run} is a {domain.name} run, which has no pictures; samples.jsonl has its "
            f"{domain.episode}s"
        )
    check_encoders()


@user_code()
def film_run(
    run: str | Path,
    words: Sequence[str] = (),
    *,
    sampled: bool = False,
    which: str = "last",
    seed: int = 0,
    device: str = "cpu",
) -> Filmed:
    """Film the first episode that :func:`klrl.train.evaluate.evaluate_run` would play.

    The arguments are those of ``evaluate_run``. The film is written to ``videos/`` in the run
    folder. It is also sent to the run's loggers, unless the run is still training.
    """
    check_film(run)
    folder = find_run(str(run), "RUN")
    config = config_on_task(folder, words)
    domain = domain_of(config)
    # An example of a name: best,sampled,seed=1,env.kwargs.g=14.
    parts = [which, *["sampled"] * sampled, *[f"seed={seed}"] * (seed != 0), *words]
    name = re.sub(r"[\s/\\'\"]+", "_", ",".join(parts))[:200]
    with filming(folder / "videos", name) as camera:
        plan = EvaluationPlan(Starts("evaluate", seed), Size(1), sampled, device_of(device))
        film = domain.function("film")(folder, config, plan, which, camera)
    files = folder / "videos" / f"{name}.mp4", folder / "videos" / f"{name}.gif"
    video = Video(f"video/{name}", *files, camera.size)
    if RunFolder(folder).status != "running":
        _show(folder, stored_config(folder), domain, video, which)
    return Filmed(video, film, domain)


def _show(folder: Path, own: JobConfig, domain: Domain, video: Video, which: str) -> None:
    """Log the film in the run's loggers, at the frame count of the filmed checkpoint."""
    at = load_component(folder, which, "counters", Counters(), device_of("cpu"))
    sweep = folder.parent.name if (folder.parent / "sweep.json").exists() else None
    guard = Guard(lambda part, error: None, "the video files are written")
    run_id = RunFolder(folder).manifest["wandb_id"]
    logged = LoggedRun(folder, asdict(own), sweep, run_id, domain, guard)
    with open_loggers(own.logger, logged) as loggers:
        for logger in loggers:
            guard.call(logger.part, logger.log_video, video, at)
