"""Run folders made by hand, for the tests of ``klrl.report`` and ``klrl.diff``."""

import json
from pathlib import Path

ROWS = 20


def write_run(folder: Path, *, seed=0, rows=None, status="finished", config=None, **manifest):
    """A run folder; ``config`` is laid over one of three groups, ``rows`` over :func:`rows_of`."""
    settings = {
        "frames": 2000,
        "seed": seed,
        "env": {"id": "Toy-v1"},
        "kl": {"mode": "legacy", "coef": 0.1},
        "loss": {"name": "klpen", "dtarg": 0.01},
        "logger": {"name": "none"},
    }
    for group, values in (config or {}).items():
        before = settings.get(group, {})
        settings[group] = {**before, **values} if isinstance(values, dict) else values
    (folder / ".hydra").mkdir(parents=True)
    (folder / ".hydra" / "config.yaml").write_text(json.dumps(settings))
    argv = ["/somewhere/bin/python", "-m", "klrl", f"kl.coef={settings['kl']['coef']}"]
    manifest = {
        "klrl": "0.1.0",
        "status": status,
        "seed": seed,
        "argv": [*argv, f"seed={seed}"],
        "pid": None,
        "started": "2026-01-01T00:00:00+00:00",
        "versions": {"numpy": "2.0"},
        **manifest,
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    rows = rows_of() if rows is None else rows
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def rows_of(reward=0.0, kl=1.0, kl_old=0.01):
    """Rows whose reward rises by one per iteration up to ``reward``."""
    return [
        {
            "iteration": i,
            "frames": 100 * i,
            "reward/episode": reward - ROWS + i,
            "kl/ref/exact": kl,
            "kl/old/exact": kl_old,
            "kl/ref/coef": 0.1,
            "kl/old/beta": 1.0,
            "time/iteration": 0.5,
            "time/frames_per_second": 200.0,
        }
        for i in range(1, ROWS + 1)
    ]
