"""Files for ``make fuzz``: prompts, YAMLs, run folders and paths, whole and damaged."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.reliability.small_run import WORDS
from benchmarks.reliability.words import TEXT, Input, text_files, texts
from benchmarks.results import ROOT
from benchmarks.small_jobs import CONTROL, LANGUAGE

# ---------------------------------------------------------------------------- bytes, any format

#: What no reader of text expects.
_BYTES = (
    *(b"\xff\xfe\xfa", b"\x00", b"\x00" * 5000, b"\xed\xa0\x80", b"\xef\xbb\xbf", b"\x1a", b"\r"),
    *(b"\x80abc", b"\xc3", "é日本\U0001f600".encode(), b"\xe2\x80\xa8", b"\x1b[2J", b"%s{0}"),
)


def damaged(r: random.Random, content: bytes) -> bytes:
    """Bytes cut, changed, moved, repeated, or with others among them."""
    at = r.randrange(len(content) + 1)
    odd = r.choice(_BYTES)
    return r.choice(
        [
            b"",
            content[:at],
            content[at:],
            content[:at] + odd + content[at:],
            content[:at] + odd + content[at + len(odd) :],
            content + content,
            content[::-1],
            content[:at] + bytes([r.randrange(256)]) + content[at + 1 :],
            content.replace(b"\n", b"\r\n"),
            content.replace(b"\n", b""),
            content.replace(b" ", b"\t"),
        ]
    )


# ------------------------------------------------------------------------------------------ JSON

#: Values of another type, or of no size that anyone expects.
_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1.5, 2**63, 2**64, 10**400, -(10**400), 1e308, float("nan")),
    *(float("inf"), "", "x", "é\u2028", "\ud800", "<script>", "x" * 10_000, "../../etc", "nan"),
    *([], {}, [[]], [None], {"": None}, [1, [2, [3]]], {"a": {"b": {}}}, ["x"] * 3),
)


def changed(r: random.Random, value: Any) -> Any:
    """A JSON value with one of its values, at any depth, replaced, dropped or repeated."""
    if isinstance(value, dict) and value and r.random() < 0.85:
        key = r.choice(sorted(value))
        change = r.random()
        if change < 0.15:
            return {k: v for k, v in value.items() if k != key}
        if change < 0.25:
            return {**value, f"{key}x": value[key]}
        return {**value, key: changed(r, value[key])}
    if isinstance(value, list) and value and r.random() < 0.7:
        at = r.randrange(len(value))
        return [*value[:at], changed(r, value[at]), *value[at + 1 :]]
    return r.choice(_VALUES)


def json_text(r: random.Random, value: Any) -> bytes:
    """A JSON text, changed in a value, in a byte, or altogether."""
    way = r.random()
    if way < 0.6:
        return json.dumps(changed(r, value)).encode("utf-8", "surrogatepass")
    if way < 0.85:
        return damaged(r, json.dumps(value, indent=1).encode())
    return r.choice(texts("json")).encode()


# --------------------------------------------------------------------------------------- prompts


def _row(r: random.Random) -> dict[str, Any]:
    digits = " ".join(str(r.randrange(10)) for _ in range(r.randint(1, 4)))
    if r.random() < 0.3:
        return {"messages": [{"role": "user", "content": digits}], "answer": 3}
    return {"prompt": digits, **({"level": r.choice([1, None, [2]])} if r.random() < 0.3 else {})}


def prompts(r: random.Random) -> Input:
    """A JSONL file of prompts, or of evaluation prompts."""
    rows = [_row(r) for _ in range(r.randint(1, 6))]
    whole = r.random() < 0.25
    lines = [json.dumps(row, ensure_ascii=r.random() < 0.5).encode() for row in rows]
    if not whole:
        at = r.randrange(len(lines))
        lines[at] = json_text(r, rows[at])
    content = r.choice([b"\n", b"\n", b"\r\n", b"\n\n"]).join(lines) + r.choice([b"", b"\n"])

    def prepare(folder: Path) -> None:
        text_files(folder)
        (folder / "mine.jsonl").write_bytes(content)

    key = r.choice(["env.data", "env.data", "env.eval_data"])
    words = f"{TEXT} kl=none {LANGUAGE}".split()
    words = [each for each in words if not each.startswith(f"{key}=")] + [f"{key}=mine.jsonl"]
    return Input("prompts", tuple(words), True if whole else None, (), prepare)


# ------------------------------------------------------------------------------------------ YAML

#: Groups of one's own, with a choice to start from that fits a control job.
_GROUPS = {"kl": "retrieve", "env": "pendulum", "loss": "klpen", "optim": "adam", "learner": "ppo"}
#: A choice of the user's that starts from one of klrl's, and a setting of each group.
OWN = "defaults:\n  - {}\n  - _self_\n\n{}\n"
_SET = {"kl": "coef: 0.2", "loss": "dtarg: 0.02", "optim": "lr: 0.001", "learner": "epochs: 2"}


def yamls(r: random.Random) -> Input:
    """A choice, or an experiment, of the user's own, below ``--config-dir``."""
    group = r.choice([*_GROUPS, "experiment"])
    start = _GROUPS.get(group, "pendulum_quick")
    preset = ROOT / "conf" / group / f"{start}.yaml"
    text = preset.read_bytes() if preset.is_file() else OWN.format(start, _SET[group]).encode()
    whole = r.random() < 0.25
    if not whole:
        way = r.random()
        if way < 0.4:
            text = damaged(r, text)
        elif way < 0.7:
            text += r.choice(texts("yaml")).encode()
        else:
            text = r.choice(texts("yaml")).encode()

    def prepare(folder: Path) -> None:
        (folder / "conf" / group).mkdir(parents=True)
        (folder / "conf" / group / "mine.yaml").write_bytes(text)

    words = ["--config-dir", "conf", f"{group}=mine", "device=cpu", "logger=none"]
    return Input("yaml", tuple(words), True if whole else None, (), prepare)


# ------------------------------------------------------------------------------------ run folders

_READ = (
    *(
        ("ls", "."),
        ("ls", "--json", "run"),
        ("diff", "run", "other"),
        ("diff", "run", "run"),
    ),
    *(("report", "run"), ("report", "."), ("report", "run", "other", "--unfinished", "-o", "out")),
    *(("evaluate", "run", "--episodes", "1"), ("resume=run", "frames=1000"), ("resume=run",)),
    *(("evaluate", "run", "--episodes", "1", "--checkpoint", "best", "--json"),),
    (*WORDS, "actor.init=run"),
    (*WORDS, "reference=checkpoint", "reference.path=run"),
)


def run_folder(r: random.Random, stock: Path) -> Input:
    """A run folder, whole or with one file damaged, and a command that reads it."""
    whole = r.random() < 0.2
    words = r.choice(_READ)
    listed = sorted(path for path in (stock / "run").rglob("*") if path.is_file())
    weights = [1 if path.suffix in (".safetensors", ".png") else 4 for path in listed]
    (path,) = r.choices(listed, weights)
    damage = _file_damage(r, path)

    def prepare(folder: Path) -> None:
        shutil.copytree(stock / "run", folder / "run")
        shutil.copytree(stock / "run", folder / "other")
        if not whole:
            damage(folder / path.relative_to(stock))

    return Input("run folder", words, True if whole else None, (), prepare)


def _file_damage(r: random.Random, path: Path) -> Callable[[Path], None]:
    content = path.read_bytes()
    if r.random() < 0.2:
        return r.choice([Path.unlink, _folder_for, _dangling, _fifo, _loop])
    if path.suffix == ".json":
        content = json_text(r, json.loads(content))
    elif path.suffix == ".jsonl" and r.random() < 0.7:
        lines = content.splitlines()
        at = r.randrange(len(lines))
        lines[at] = json_text(r, json.loads(lines[at]))
        content = b"\n".join(lines) + b"\n"
    elif path.suffix == ".yaml" and r.random() < 0.4:
        content = r.choice(
            [r.choice(texts("yaml")).encode(), content + r.choice(texts("yaml")).encode()]
        )
    else:
        content = damaged(r, content)
    return lambda file: _rewrite(file, content)


def _rewrite(path: Path, content: bytes) -> None:
    path.write_bytes(content)


def _folder_for(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _dangling(path: Path) -> None:
    path.unlink()
    path.symlink_to("nowhere")


def _loop(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


def _fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


# ------------------------------------------------------------------------------------------ paths


def path_input(r: random.Random, stock: Path) -> Input:
    """A path where a command or a setting takes one."""
    form, path = r.choice(texts("takes")), r.choice(texts("paths"))
    words = [each.format(path) if "{}" in each else each for each in form.split()]
    if words[0] == "TEXT":
        key = words[1].split("=")[0]
        base = f"{TEXT} kl=none {LANGUAGE}".split()
        words = [each for each in base if not each.startswith(f"{key}=")] + words[1:]
    elif "=" in words[0] and not words[0].startswith("resume"):
        words = ["env=pendulum", *CONTROL.split(), *words]

    def prepare(folder: Path) -> None:
        text_files(folder)
        shutil.copytree(stock / "run", folder / "run")
        (folder / "file").write_text("x")
        (folder / "empty").mkdir()
        (folder / "a b").mkdir()
        (folder / "new\nline").mkdir()
        (folder / "dangling").symlink_to("nowhere")
        (folder / "loop").symlink_to("loop")
        os.mkfifo(folder / "fifo")
        (folder / "secret").mkdir(mode=0)

    missing = path in ("missing", "run/missing")
    reads = missing and form.split()[0].split("=")[0] in ("resume", "evaluate", "actor.init")
    return Input("path", tuple(words), False if reads else None, (path,) if reads else (), prepare)
