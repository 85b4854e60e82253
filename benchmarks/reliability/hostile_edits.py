"""What makes a folder hostile: the edits that the cases of hostile.yaml name, one after another."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import pickle
import py_compile
import shutil
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from benchmarks.reliability.hostile_stock import EVIL, Stock
from benchmarks.reliability.hostile_watch import TAG
from benchmarks.reliability.words import joined

#: What a planted shell script, YAML or template runs.
SHELL = 'echo ran >> "$KLRL_MARK"'
JOB = "outputs/sw/seed=0"
EDITS: dict[str, Callable[..., None]] = {}


def edit(function: Callable[..., None]) -> Callable[..., None]:
    """Known to the table by its name, the last underscore aside."""
    EDITS[function.__name__.rstrip("_")] = function
    return function


def settings_of(run: Path) -> dict[str, Any]:
    """The stored settings of a run."""
    return yaml.safe_load((run / ".hydra" / "config.yaml").read_text())


def store(run: Path, settings: Mapping[str, Any]) -> None:
    """Put settings in their place."""
    (run / ".hydra" / "config.yaml").write_text(yaml.safe_dump(dict(settings), sort_keys=False))


@edit
def set_(stock: Stock, run: str, **dotted: Any) -> None:
    """Change stored settings."""
    settings = settings_of(stock.work / run)
    for key, value in dotted.items():
        *groups, last = key.split(".")
        node = settings
        for group in groups:
            node = node[group]
        node[last] = value
    store(stock.work / run, settings)


@edit
def set_all(stock: Stock, runs: Sequence[str], values: Mapping[str, Any]) -> None:
    for run in runs:
        set_(stock, run, **values)


@edit
def call(stock: Stock, part: str, **call: Any) -> None:
    """A part of the user's own that is a function of Python's."""
    settings = stock.stored[part]
    whole = {**settings[part], **call, "path": None, "source": None, "version": None}
    store(stock.work / "run", {**settings, part: whole})


@edit
def stored(stock: Stock, part: str, run: str = "run", path: str | None = None) -> None:
    """A part of the module ``evil``, which is planted in the run."""
    plant(stock, f"{run}/evil.py")
    store(stock.work / run, _with_path(stock.stored[part], path))


def _with_path(value: Any, path: str | None) -> Any:
    if isinstance(value, dict):
        changed = {key: _with_path(each, path) for key, each in value.items()}
        named = str(changed.get("target")).startswith("evil:")
        return {**changed, "path": path} if named else changed
    return [_with_path(each, path) for each in value] if isinstance(value, list) else value


@edit
def write(stock: Stock, path: str, text: Any) -> None:
    place = stock.work / path
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_bytes(_text(text))


@edit
def plant(stock: Stock, path: str) -> None:
    """A module that marks whoever imports it."""
    write(stock, path, EVIL)


@edit
def fill(stock: Stock, name: str, text: Any) -> None:
    """A text in the place of a file of the run, and of the sweep's job."""
    for path in (stock.work / "run" / name, stock.work / JOB / name):
        if path.exists():
            path.write_bytes(_text(text))


def _text(told: Any) -> bytes:
    if told == "deep block":
        return "\n".join(" " * i + "a:" for i in range(2000)).encode()
    if told == "many metrics":
        return json.dumps({"frames": 64, **{f"m{i}": 0.0 for i in range(100_000)}}).encode()
    return joined(told).encode()


@edit
def json_(stock: Stock, path: str, anew: bool = False, **entries: Any) -> None:
    """Change entries of a JSON file."""
    place = stock.work / path
    before = {} if anew else json.loads(place.read_text())
    place.write_text(json.dumps({**before, **entries}))


@edit
def jobs(stock: Stock, only: str = "", **entries: Any) -> None:
    """Change entries of the jobs of sweep.json."""
    path = stock.work / "outputs/sw/sweep.json"
    record = json.loads(path.read_text())
    for job in record["jobs"]:
        if only in ("", job["name"]):
            job.update(entries)
    path.write_text(json.dumps(record))


class _Bomb:
    """Unpickled, it runs a command."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f": {TAG}; " + SHELL.replace("ran", "unpickled"),)


def bomb() -> bytes:
    """A pickle that marks whoever reads it."""
    return pickle.dumps(("success", _Bomb()))


@edit
def bomb_(stock: Stock, path: str) -> None:
    (stock.work / path).write_bytes(bomb())


@edit
def pickled(stock: Stock, model: str) -> None:
    """A model's weights are a pickle alone."""
    for path in (stock.work / model).glob("*.safetensors"):
        path.with_name("pytorch_model.bin").write_bytes(bomb())
        path.unlink()


@edit
def copy(stock: Stock, path: str, to: str) -> None:
    shutil.copytree(stock.work / path, stock.work / to)


@edit
def move(stock: Stock, path: str, to: str) -> None:
    shutil.move(stock.work / path, to)


@edit
def link(stock: Stock, path: str, to: str) -> None:
    (stock.work / path).symlink_to(to)


@edit
def remove(stock: Stock, path: str) -> None:
    _remove(stock.work / path)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)


@edit
def rename(stock: Stock, name: str) -> None:
    target = os.fsencode(stock.work) + b"/" + os.fsencode(name)
    os.rename(os.fsencode(stock.work / "run"), target)  # noqa: PTH104


@edit
def kind(stock: Stock, path: str, kind: str) -> None:
    """A pipe, a folder, a device or a loop in the place of a file."""
    place = stock.work / path
    _remove(place)
    place.parent.mkdir(parents=True, exist_ok=True)
    if kind == "pipe":
        os.mkfifo(place)
    elif kind == "folder":
        write(stock, f"{path}/file.txt", "x")
    else:
        place.symlink_to("/dev/zero" if kind == "device" else place.name)


@edit
def away(stock: Stock, path: str, how: str, folder: bool = False) -> None:
    """A link in the place of a file or folder; what was there is now the user's."""
    place = stock.work / path
    target = stock.victim / f"away-{place.name}"
    place.parent.mkdir(parents=True, exist_ok=True)
    if place.is_dir():
        shutil.move(place, target)
    elif place.exists():
        shutil.copy2(place, target)
        place.unlink()
    elif folder:
        target.mkdir()
        for name in ("file.txt", "last.mp4", "last.gif", "report.html", "summary.csv"):
            (target / name).write_text("the user's\n")
    else:
        target.write_text("the user's\n")
    if how == "hard":
        os.link(target, place)
    else:
        place.symlink_to(target)


@edit
def entry(
    stock: Stock,
    run: str,
    bombs: Sequence[str] = (),
    listed: bool = False,
    lists: str = "",
    manifest: str = "",
    kind: Sequence[str] = (),
    away: str | None = None,
) -> None:
    """The only entry of a run: pickles in it, names in its manifest, a link or pipe as a file."""
    entries = sorted((stock.work / run / "checkpoints" / "last").glob("frames-*"))
    for other in (stock.work / run / "checkpoints" / "last").iterdir():
        if other != entries[-1]:
            shutil.rmtree(other)
    only = entries[-1]
    for name in bombs:
        (only / name).write_bytes(bomb())
    if listed:
        _seal(only, dict.fromkeys(bombs, bomb()))
    if lists:
        _seal(only, {lists: b"the user's file.txt\n"})
    if manifest:
        (only / "manifest.json").write_text(manifest)
    if kind:
        EDITS["kind"](stock, f"{only.relative_to(stock.work)}/{kind[0]}", kind[1])
    if away is not None:
        path, target = only / away, stock.victim / f"away-{away}"
        shutil.move(path, target)
        (only / away if away else only).symlink_to(target)


def _seal(entry: Path, files: Mapping[str, bytes]) -> None:
    """Make an entry's manifest right for its files, and for files of any name."""
    path = entry / "manifest.json"
    manifest = json.loads(path.read_text())
    contents = {name: (entry / name).read_bytes() for name in manifest["files"]} | dict(files)
    listed = {
        name: {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        for name, content in contents.items()
    }
    blank = "0" * len(manifest["sha256"])
    text = json.dumps({**manifest, "files": listed, "sha256": blank}, indent=1)
    path.write_text(text.replace(blank, hashlib.sha256(text.encode()).hexdigest(), 1))


# ------------------------------------------------------------------------------ edits of one case


@edit
def bytecode(stock: Stock) -> None:
    """The source is the user's own to the byte; the bytecode beside it is not."""
    source, evil = stock.work / "mine" / "lab.py", stock.work / "evil.py"
    shutil.move(stock.work / "lab.py", source)
    evil.write_text(EVIL)
    cache = Path(importlib.util.cache_from_source(str(source)))
    cache.parent.mkdir()
    mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
    py_compile.compile(str(evil), str(cache), dfile=str(source), invalidation_mode=mode)
    evil.unlink()


@edit
def git(stock: Stock, folder: str) -> None:
    """What ``git status`` runs, in a folder that came with a repository and a commit in it."""
    place = stock.work / folder
    hook = place / "fsmonitor.sh"
    hook.write_text(f"#!/bin/sh\n# {TAG}\n{SHELL}\n")
    hook.chmod(0o700)
    write(stock, f"{folder}/.git/HEAD", "ref: refs/heads/main\n")
    config = f"[core]\n\trepositoryformatversion = 0\n\tfsmonitor = {hook}\n"
    write(stock, f"{folder}/.git/config", config)

    def put(kind: str, content: bytes) -> str:
        whole = f"{kind} {len(content)}\0".encode() + content
        name = hashlib.sha1(whole).hexdigest()
        path = place / ".git" / "objects" / name[:2] / name[2:]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(zlib.compress(whole))
        return name

    by = "a <a> 0 +0000"
    commit = f"tree {put('tree', b'')}\nauthor {by}\ncommitter {by}\n\nx\n"
    write(stock, f"{folder}/.git/refs/heads/main", put("commit", commit.encode()))


@edit
def outcomes(stock: Stock) -> None:
    """One of submitit's for every process that may come."""
    folder = stock.work / "outputs" / "sw" / ".submitit"
    folder.mkdir()
    first = folder / "0_0_result.pkl"
    first.write_bytes(bomb())
    now = os.getpid()
    for pid in range(now, now + 1500):
        os.link(first, folder / f"{pid}_0_result.pkl")
    for job in ("seed=0", "seed=1"):
        shutil.rmtree(stock.work / "outputs" / "sw" / job)


@edit
def shards(stock: Stock, to: str) -> None:
    """An index of the weights that leads away."""
    model = stock.work / "model"
    weights = next(model.glob("*.safetensors"))
    names = json.loads(weights.read_bytes()[8:].partition(b"}}")[0].decode() + "}}")
    index = {name: to for name in names if name != "__metadata__"}
    text = json.dumps({"metadata": {}, "weight_map": index})
    (model / "model.safetensors.index.json").write_text(text)
    weights.rename(model / "x.safetensors")


@edit
def feed(stock: Stock, where: str, text: str) -> None:
    """A text in every place that is printed or drawn."""
    run = stock.work / "run"
    if where == "settings":
        set_(stock, "run", **{"env.id": text, "actor.activation": text})
        store(run, {**settings_of(run), text: {text: text}})
        return
    if where == "samples":
        path = stock.work / "lm" / "samples.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        rows = [{**row, "response": text, "prompt": text} for row in rows]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return
    said = ("error", "klrl", "host", "git_commit", "started", "wandb_id", "device")
    json_(
        stock, "run/manifest.json", status="failed", argv=[text], resume="exact",
        versions={text: text}, side_failures=[{"part": text, "error": text, "when": text}],
        **dict.fromkeys(said, text),
    )  # fmt: skip
    jobs(stock, error=text, status="failed", overrides=[text], name=text)
    path = stock.work / "outputs" / "sw" / "sweep.json"
    listed = json.loads(path.read_text())["jobs"]
    listed.append({**listed[0], "folder": "missing"})
    path.write_text(json.dumps({"commands": [text], "command": text, "jobs": listed}))
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"frames": 192, "iteration": 3, text: 1.0}) + "\n")


@edit
def trial(stock: Stock) -> None:
    """A trial that was running: its words are the attacker's."""
    plant(stock, "outputs/sw/evil.py")
    folder = stock.work / "outputs" / "sw"
    part = ("controller=custom", "controller.target=evil:Controller", f"controller.path={folder}")
    words = {"words": [*part, "kl.coef=0.1"]}
    begun = {"study_id": 0, "datetime_start": "2026-01-01T00:00:00.000000"}
    lines = [
        {"op_code": 0, "worker_id": "w", "study_name": "klrl", "directions": [2]},
        {"op_code": 4, "worker_id": "w", **begun},
        {"op_code": 8, "worker_id": "w", "trial_id": 0, "user_attr": words},
    ]
    (folder / "study.journal").write_text("".join(json.dumps(line) + "\n" for line in lines))
