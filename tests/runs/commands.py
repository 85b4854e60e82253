"""klrl as a user starts it, and what its run folders hold."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from klrl.__main__ import main
from klrl.config.choices import ALL_GROUPS
from klrl.runs.metrics import TIMES
from klrl.runs.owner import OWNER_FILE
from klrl.runs.rows import read_rows


def rows_of(folder: Path) -> list[dict]:
    return read_rows(folder / "metrics.jsonl")


def timeless(rows: list[dict]) -> list[dict]:
    return [{k: v for k, v in row.items() if k not in TIMES} for row in rows]


def samples_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text("utf-8").splitlines()]


def manifest_of(folder: Path) -> dict:
    return json.loads((folder / "manifest.json").read_text(encoding="utf-8"))


def only_run() -> Path:
    (folder,) = Path("outputs").iterdir()
    return folder


def last_choices(words: Sequence[str]) -> list[str]:
    """Of two choices of a group the later: a test's own follows that of a common list."""
    last = {word.partition("=")[0]: word for word in words}
    return [w for w in words if w.partition("=")[0] not in ALL_GROUPS or w in last.values()]


def exits(*words: str) -> int:
    with pytest.raises(SystemExit) as stop:
        main(last_choices(words))
    return int(stop.value.code or 0)


def said(capsys: pytest.CaptureFixture, *words: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command."""
    capsys.readouterr()
    code = exits(*words)
    return code, *capsys.readouterr()


#: Processes of the test that is running; a test that fails leaves none behind (conftest.py).
CHILDREN: list[subprocess.Popen] = []


def child(*words: str, **environment: str) -> subprocess.Popen:
    """``klrl WORDS`` in a fork, which need not import torch; its output and errors in one pipe."""

    def klrl() -> None:
        code = 1
        try:
            os.closerange(3, 1024)  # with them the pipe by which subprocess waits for an exec
            os.environ |= {"WANDB_MODE": "offline", **environment}
            sys.stdout, sys.stderr = (os.fdopen(n, "w", 1, closefd=False) for n in (1, 2))
            main(last_choices(words))
        except SystemExit as stop:
            code = int(stop.code or 0)
        finally:
            sys.stdout.flush()
            os._exit(code)

    process = subprocess.Popen(
        ["klrl"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, preexec_fn=klrl
    )
    CHILDREN.append(process)
    return process


def wandb_records(job: Path, which: str = "offline-run-*") -> dict[str, list[dict]]:
    """The records of a run's file by type, as wandb's own reader tells them."""
    (path,) = job.glob(f"wandb/{which}/run-*.wandb")
    done = subprocess.run(
        [Path(sys.executable).with_name("wandb"), "leet", "inspect", "--json", path],
        capture_output=True,
        text=True,
        check=True,
    )
    found: dict[str, list[dict]] = {}
    for line in filter(None, done.stdout.splitlines()):
        record = json.loads(line)
        found.setdefault(record["type"], []).append(record[record["type"]])
    return found


def live_elsewhere(run: Path) -> None:
    """As a run that process 7 of another machine is running."""
    path = run / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"status": "running", "pid": 7}))
    owner = {"host": "elsewhere", "pid": 7, "job": None, "restarts": 0}
    owner |= {"heartbeat": int(time.time())}
    (run / OWNER_FILE).write_text(json.dumps(owner))
