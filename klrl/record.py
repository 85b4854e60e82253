"""What a run leaves behind: its rows, its loggers, how it ended."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from tensordict import TensorDictBase

from klrl.checkpoint import Counters
from klrl.config import JobConfig
from klrl.curves import draw_curves
from klrl.errors import Interrupted
from klrl.kl.build import KL_KEY, RAW_REWARD_KEY, ReferenceKL
from klrl.learner import Learned
from klrl.loggers import JsonlLogger, Logger, Samples, read_rows, wandb_run
from klrl.metrics import Row, check_row, learned_row
from klrl.progress import Progress, duration
from klrl.run_folder import RunFolder


def make_row(
    counters: Counters,
    batch: TensorDictBase,
    kl: ReferenceKL | None,
    measured: Mapping[str, torch.Tensor],
    learned: Learned,
    klpen: bool,
    seconds: float,
) -> Row:
    """One line of ``metrics.jsonl``; names and units in :mod:`klrl.metrics`.

    Args:
        counters: of the iteration that was just done.
        batch: its rollout [N, T], charged.
        kl: KL(policy||reference) of the run, None for ``kl=none``.
        measured: that KL of the rollout by every estimator.
        learned: what the update gave.
        klpen: whether the loss has a beta.
        seconds: what the iteration took.
    """
    after = batch.get("next")
    shaped = _mean(after.get("reward"))
    row: Row = {
        "iteration": counters.iteration,
        "frames": counters.frames,
        "reward/raw": shaped,
        "reward/shaped": shaped,
        "kl/ref/coef": 0.0,
        "kl/ref/penalty": 0.0,
        **learned_row(learned, klpen),
        "time/iteration": seconds,
        "time/frames_per_second": batch.numel() / seconds,
    }
    row.update({f"kl/ref/{name}": float(value) for name, value in measured.items()})
    if kl is not None:
        row["kl/ref/coef"] = kl.coef
        if kl.transform is not None:
            row["reward/raw"] = _mean(after.get(RAW_REWARD_KEY))
            row["kl/ref/penalty"] = kl.coef * _mean(after.get(KL_KEY))
        if kl.loss_estimator is not None:
            row["loss/kl_ref"] = learned.kl_ref
    row.update(_episodes(after))
    return check_row(row)


def _mean(value: torch.Tensor) -> float:
    """Mean in float64: the ledger's identity holds to rounding of the rewards themselves."""
    return float(value.double().mean())


def _episodes(after: TensorDictBase) -> Row:
    """Return and length of the episodes that ended in a rollout; nothing where none did."""
    ended = after.get("done")
    if not ended.any():
        return {"reward/episodes": 0}
    return {
        "reward/episode": _mean(after.get("episode_reward")[ended]),
        "reward/episode_length": _mean(after.get("step_count")[ended]),
        "reward/episodes": int(ended.sum()),
    }


@contextmanager
def keep_status(files: RunFolder, config: JobConfig, counters: Counters) -> Iterator[None]:
    """Keep ``manifest.json`` true about how the run ended, and draw its curves."""
    status = "failed"
    more: dict[str, Any] = {"error": None}
    try:
        yield
        status = "finished"
    except (Interrupted, KeyboardInterrupt):
        status = "interrupted"
        raise
    except Exception as error:
        more["error"] = " ".join(f"{type(error).__name__}: {error}".split())
        raise
    finally:
        files.close(status, **{config.axis: counters.frames}, **more)
        rows = read_rows(files.metrics) if files.metrics.exists() else []
        if rows:
            title = f"{config.title}  {files.path.name}  {status}"
            draw_curves(rows, files.curves, title, config.axis, config.unit)
        if status != "finished":
            done = f"{counters.frames:,} {config.axis}"
            print(f"{status} at {done}; run folder: {files.path}")


@contextmanager
def recording(
    files: RunFolder,
    config: JobConfig,
    counters: Counters,
    *,
    group: str | None,
    wandb_id: str,
    resume: bool,
) -> Iterator[tuple[Callable[[Row, Samples], None], Progress]]:
    """Open the run's files, wandb and the progress line; close them whatever happens.

    Yields:
        A function that takes a row and the samples to show with it, and the progress line.
    """
    after = counters.frames if resume else None
    metrics = JsonlLogger(files.metrics, after, config.axis)
    shown = JsonlLogger(files.samples, after, config.axis) if config.axis == "samples" else None
    total = config.iterations * config.frames_per_iteration
    settings = dataclasses.asdict(config)
    try:
        with (
            wandb_run(config.logger, files.path, settings, group, wandb_id, config.axis) as others,
            Progress(total, done=counters.frames, axis=config.axis) as progress,
        ):
            loggers: list[Logger] = [metrics, *others]

            def record(row: Row, samples: Samples = ()) -> None:
                if samples and shown is not None:
                    shown.log_all(samples)
                    for wandb in others:
                        wandb.log_samples(samples)
                for logger in loggers:
                    logger.log(row)
                progress.show(row)

            yield record, progress
    finally:
        metrics.close()
        if shown is not None:
            shown.close()
    print(summary(files, config, counters.frames))


def summary(files: RunFolder, config: JobConfig, frames: int) -> str:
    """The closing lines of a finished run."""
    rows = read_rows(files.metrics)
    last = rows[-1] if rows else {}
    passed = duration(sum(r["time/iteration"] for r in rows))
    lines = [f"finished {frames:,} {config.axis} in {passed}"]
    evaluated = [row["eval/return"] for row in rows if "eval/return" in row]
    if evaluated:
        digits = 1 if config.axis == "frames" else 3
        best = f"{max(evaluated):.{digits}f}"
        lines.append(f"  evaluation return {evaluated[-1]:.{digits}f} (best {best})")
    if "kl/ref/exact" in last:
        lines.append(
            f"  KL(policy||reference) {last['kl/ref/exact']:.4f} nats, "
            f"penalty {last['kl/ref/penalty']:.4f} per {config.unit} "
            f"at coef {last['kl/ref/coef']:g}"
        )
    return "\n".join([*lines, f"  run folder: {files.path}"])
