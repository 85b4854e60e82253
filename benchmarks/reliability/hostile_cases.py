"""Hostile run, sweep, model and cache folders, made of honest ones."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import pickle
import py_compile
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from benchmarks.reliability.hostile_stock import EVIL, PARTS, Stock
from benchmarks.reliability.hostile_watch import TAG

Prepare = Callable[[Stock], None]

#: What reads a run, without a change to it, and never imports code.
READ = ("ls", "ls --json", "report", "diff", "diff --bits")
CONTROL = ("evaluate", "resume", "reference", "init", "load", *READ)
LANGUAGE = ("evaluate lm", "resume lm", "reference lm", "init lm", "load lm", "export", "verify")
READ_LANGUAGE = ("ls", "report lm", "diff lm")
SWEEP = ("sweep", "plan", "ls sweep", "report sweep")


@dataclass(frozen=True)
class Case:
    """A hostile folder.

    Attributes:
        name: of the case.
        prepare: makes it of the stock.
        commands: names of those that are given it.
        quick: the commands of ``--quick``; empty: none.
        cwd: where they are given, below the working folder.
        codes: exit codes that are right.
        lines: how many lines stderr may have.
        fed: a text that may be neither printed raw nor stand raw in a page.
        slow: only where everything is tried.
    """

    name: str
    prepare: Prepare
    commands: tuple[str, ...]
    quick: tuple[str, ...] = ()
    cwd: str = "."
    codes: tuple[int, ...] = (0, 2)
    lines: int = 2
    slow: bool = False
    fed: str = ""


def cases() -> list[Case]:
    """All of them."""
    return [
        *_honest(),
        *_custom(),
        *_rewards(),
        *_interpolations(),
        *_pickles(),
        *_models(),
        *_links(),
        *_kinds_of_files(),
        *_texts(),
        *_names(),
        *_paths(),
        *_searches(),
    ]


# ------------------------------------------------------------------------------------------ tools


def settings_of(run: Path) -> dict[str, Any]:
    """The stored settings of a run."""
    return yaml.safe_load((run / ".hydra" / "config.yaml").read_text())


def store(run: Path, settings: Mapping[str, Any]) -> None:
    """Put settings in their place."""
    (run / ".hydra" / "config.yaml").write_text(yaml.safe_dump(dict(settings), sort_keys=False))


def set_in(run: Path, **dotted: Any) -> None:
    """Change stored settings; a dot in a key is written as two underscores."""
    settings = settings_of(run)
    for key, value in dotted.items():
        *groups, last = key.split("__")
        node = settings
        for group in groups:
            node = node[group]
        node[last] = value
    store(run, settings)


def edit_json(path: Path, **entries: Any) -> None:
    """Change entries of a JSON file."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **entries}))


def plant(folder: Path, name: str = "evil.py") -> None:
    """A module that marks whoever imports it."""
    (folder / name).write_text(EVIL)


class _Bomb:
    """Unpickled, it runs a command."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f': {TAG}; echo unpickled >> "$KLRL_MARK"',)


def bomb() -> bytes:
    """A pickle that marks whoever reads it."""
    return pickle.dumps(("success", _Bomb()))


def entry_of(run: Path, which: str = "last") -> Path:
    """The newest entry of a run."""
    return sorted((run / "checkpoints" / which).glob("frames-*"))[-1]


def only_entry(run: Path) -> Path:
    """The newest entry of a run, the others taken away."""
    entry = entry_of(run)
    for other in (run / "checkpoints" / "last").iterdir():
        if other != entry:
            shutil.rmtree(other)
    return entry


def seal(entry: Path, files: Mapping[str, bytes] | None = None) -> None:
    """Make an entry's manifest right for its files, and for files of any name."""
    path = entry / "manifest.json"
    manifest = json.loads(path.read_text())
    listed = dict(manifest["files"])
    for name in listed:
        listed[name] = _told((entry / name).read_bytes())
    listed |= {name: _told(content) for name, content in (files or {}).items()}
    blank = "0" * len(manifest["sha256"])
    text = json.dumps({**manifest, "files": listed, "sha256": blank}, indent=1)
    path.write_text(text.replace(blank, hashlib.sha256(text.encode()).hexdigest(), 1))


def _told(content: bytes) -> dict[str, Any]:
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def interrupted(job: Path) -> None:
    """A job that goes on."""
    edit_json(job / "manifest.json", status="interrupted")


def _job(stock: Stock) -> Path:
    return stock.work / "outputs" / "sw" / "seed=0"


# ------------------------------------------------------------------------------------------ cases


def _honest() -> Iterator[Case]:
    def nothing(stock: Stock) -> None:
        pass

    everything = (*CONTROL, *LANGUAGE, *READ_LANGUAGE, *SWEEP, "evaluate mine", "resume mine")
    yield Case("honest", nothing, everything, everything, codes=(0,), lines=0)
    yield Case("honest, filmed", nothing, ("video",), codes=(0,), lines=0)


def _stored_part(stock: Stock, part: str, path: str | None) -> None:
    run, settings = stock.work / "run", stock.stored[part]
    plant(run)
    store(run, _with_path(settings, path and path.replace("RUN", str(run))))


def _with_path(value: Any, path: str | None) -> Any:
    if isinstance(value, dict):
        changed = {key: _with_path(each, path) for key, each in value.items()}
        named = str(changed.get("target")).startswith("evil:")
        return {**changed, "path": path} if named else changed
    return [_with_path(each, path) for each in value] if isinstance(value, list) else value


_SHELL = 'echo ran >> "$KLRL_MARK"'


def _custom() -> Iterator[Case]:
    popen = {"target": "subprocess:Popen", "args": {"args": _SHELL, "shell": True}}
    getoutput = {"target": "subprocess:getoutput", "args": {"cmd": _SHELL}}

    def shell(stock: Stock, part: str, call: Mapping[str, Any]) -> None:
        settings = stock.stored[part]
        whole = {**settings[part], **call, "path": None, "source": None, "version": None}
        store(stock.work / "run", {**settings, part: whole})

    for part in ("env", "controller", "logger", "loss", "advantage", "actor"):
        quick = ("evaluate", "resume", "reference", "init") if part == "env" else ()
        name = f"{part}.target=subprocess"
        yield Case(f"{name}:Popen", partial(shell, part=part, call=popen), CONTROL, quick)
        yield Case(f"{name}:getoutput", partial(shell, part=part, call=getoutput), CONTROL)
    for part in PARTS:
        quick = (*CONTROL,) if part == "env" else ("evaluate", "resume")
        beside = partial(_stored_part, part=part, path="RUN")
        yield Case(f"{part}.path=RUN", beside, CONTROL, quick)
        here = partial(_stored_part, part=part, path=None)
        quick = ("evaluate here",) if part in ("env", "env.wrappers") else ()
        commands = ("evaluate here", "resume here", "load here", "ls", "report here", "diff here")
        yield Case(f"{part}.target=evil:..., given in RUN", here, commands, quick, cwd="run")

    def env_id(stock: Stock, module: str) -> None:
        plant(stock.work / "run")
        set_in(stock.work / "run", env__id=module)

    commands = ("evaluate here", "resume here", "load here", "ls", "report here")
    evil = partial(env_id, module="evil:Evil-v0")
    yield Case("env.id=evil:Evil-v0, given in RUN", evil, commands, commands[:2], cwd="run")
    odd = partial(env_id, module="antigravity:Pendulum-v1")
    yield Case("env.id=antigravity:Pendulum-v1", odd, CONTROL, ("evaluate",))

    def job(stock: Stock) -> None:
        plant(_job(stock))
        settings = _with_path(stock.stored["env"], str(_job(stock)))
        store(_job(stock), settings)
        interrupted(_job(stock))

    yield Case("a sweep's job with env.path=RUN", job, SWEEP, ("sweep",))

    def changed(stock: Stock) -> None:
        """The user's own part is known by its digest; the run's file of that name is another."""
        mine = stock.work / "mine"
        plant(mine, "lab.py")
        (stock.work / "lab.py").unlink()
        settings = settings_of(mine)
        settings["env"]["path"] = str(mine)
        store(mine, settings)

    yield Case("lab.py of the run is not the user's", changed, ("evaluate mine", "resume mine"), ())

    def bytecode(stock: Stock) -> None:
        """The source is the user's own to the byte; the bytecode beside it is not."""
        mine, evil = stock.work / "mine", stock.work / "evil.py"
        source = (stock.work / "lab.py").read_text()
        (stock.work / "lab.py").unlink()
        (mine / "lab.py").write_text(source)
        evil.write_text(EVIL)
        cache = Path(importlib.util.cache_from_source(str(mine / "lab.py")))
        cache.parent.mkdir()
        mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
        py_compile.compile(
            str(evil), str(cache), dfile=str(mine / "lab.py"), invalidation_mode=mode
        )
        evil.unlink()
        settings = settings_of(mine)
        settings["env"]["path"] = str(mine)
        store(mine, settings)

    commands = ("evaluate mine", "resume mine")
    yield Case("the user's lab.py with another's .pyc", bytecode, commands, commands[:1])

    def git(stock: Stock, folder: str) -> None:
        """What ``git status`` runs, in a folder that came with a repository in it."""
        place = stock.work / folder
        (place / ".git").mkdir()
        for name in ("objects", "refs"):
            (place / ".git" / name).mkdir()
        (place / ".git" / "HEAD").write_text("ref: refs/heads/main\n")
        hook = place / "fsmonitor.sh"
        hook.write_text(f'#!/bin/sh\n# {TAG}\necho ran >> "$KLRL_MARK"\n')
        hook.chmod(0o700)
        head = place / ".git" / "refs" / "heads"
        head.mkdir()
        (place / ".git" / "config").write_text(
            f"[core]\n\trepositoryformatversion = 0\n\tfsmonitor = {hook}\n"
        )
        _commit(place, head / "main")

    yield Case(
        "a .git with core.fsmonitor, given in RUN",
        partial(git, folder="run"),
        ("resume here", "evaluate here"),
        ("resume here",),
        cwd="run",
    )


def _commit(place: Path, head: Path) -> None:
    """A commit of nothing, without git's own hand."""
    import zlib

    def put(kind: str, content: bytes) -> str:
        whole = f"{kind} {len(content)}\0".encode() + content
        name = hashlib.sha1(whole).hexdigest()
        path = place / ".git" / "objects" / name[:2] / name[2:]
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(zlib.compress(whole))
        return name

    tree = put("tree", b"")
    by = "a <a> 0 +0000"
    head.write_text(put("commit", f"tree {tree}\nauthor {by}\ncommitter {by}\n\nx\n".encode()))


def _rewards() -> Iterator[Case]:
    def reward(stock: Stock, value: Any, weights: Any = None) -> None:
        plant(stock.work / "lm")
        plant(stock.work, "evil_above.py")
        set_in(stock.work / "lm", env__reward=value, env__reward_weights=weights)

    commands = (*LANGUAGE, *READ_LANGUAGE)
    here = ("evaluate lm here", "resume lm here", "verify here", "export here")
    yield Case(
        "env.reward=evil:score, given in RUN", partial(reward, value="evil:score"), here, here[:2],
        cwd="lm",
    )  # fmt: skip
    yield Case(
        "env.reward=evil_above:score", partial(reward, value="evil_above:score"), commands,
        ("evaluate lm",),
    )  # fmt: skip
    yield Case(
        "env.reward=[exact,evil_above:score]",
        partial(reward, value=["exact", "evil_above:score"], weights=[1.0, 0.5]),
        commands, ("resume lm",),
    )  # fmt: skip
    yield Case(
        "env.reward=FILE:NAME", partial(reward, value="lm/evil.py:score"), commands,
        ("evaluate lm", "resume lm"),
    )  # fmt: skip
    yield Case("env.reward=os:system", partial(reward, value="os:system"), commands)
    yield Case("env.reward=antigravity:fly", partial(reward, value="antigravity:fly"), commands)


def _interpolations() -> Iterator[Case]:
    texts = {
        "env": "${oc.env:KLRL_SECRET}",
        "oc.env within a text": "x-${oc.env:KLRL_SECRET}-${oc.env:HOME}",
        "oc.decode": "${oc.decode:${oc.env:KLRL_SECRET}}",
        "hydra": "${hydra:runtime.cwd}",
        "now": "${now:%Y}",
        "unknown": "${evil:1}",
        "create": "${oc.create:${oc.env:KLRL_SECRET}}",
        "key": "${kl.coef}",
    }
    for name, text in texts.items():
        quick = ("evaluate", "resume") if name == "env" else ()
        whole = partial(_set_run, env__id=text)
        yield Case(f"env.id=${{{name}}}", whole, CONTROL, quick)
        if name != "key":
            free = partial(_set_lm, logger__name="none", env__data=text)
            yield Case(f"lm: env.data=${{{name}}}", free, (*LANGUAGE, *READ_LANGUAGE))
            model = partial(_set_lm, actor__model=text)
            quick = ("evaluate lm",) if name == "env" else ()
            yield Case(f"lm: actor.model=${{{name}}}", model, LANGUAGE, quick)
    pin = "${oc.decode:${oc.env:KLRL_PIN}}"
    yield Case(
        "env.kwargs.g=${oc.env}", partial(_set_run, env__kwargs={"g": pin}), CONTROL,
        ("evaluate", "resume", "reference"),
    )  # fmt: skip
    yield Case("kl.coef=${oc.env}", partial(_set_run, kl__coef=pin), CONTROL, ("resume", "init"))
    yield Case("actor.init=${oc.env}", partial(_set_run, actor__init="${oc.env:HOME}"), CONTROL)

    def overrides(stock: Stock) -> None:
        path = stock.work / "run" / ".hydra" / "overrides.yaml"
        path.write_text("- env.id=${oc.env:KLRL_SECRET}\n- kl.coef=${oc.env:KLRL_PIN}\n")

    yield Case("overrides.yaml", overrides, CONTROL, ("resume",))

    def sweep_file(stock: Stock) -> None:
        path = stock.work / "outputs" / "sw" / "sweep.json"
        record = json.loads(path.read_text())
        for job in record["jobs"]:
            job["overrides"] = ["env.id=${oc.env:KLRL_SECRET}", "env=custom"]
        path.write_text(json.dumps({**record, "command": "${oc.env:KLRL_SECRET}"}))

    yield Case("sweep.json", sweep_file, SWEEP, ("sweep",))

    def manifest(stock: Stock) -> None:
        for run in ("run", "lm"):
            path = stock.work / run / "manifest.json"
            edit_json(path, wandb_id="${oc.env:KLRL_SECRET}", argv=["${oc.env:KLRL_SECRET}"])

    yield Case("manifest.json", manifest, (*CONTROL, *LANGUAGE), ("resume",))


def _set_run(stock: Stock, **dotted: Any) -> None:
    set_in(stock.work / "run", **dotted)


def _set_lm(stock: Stock, **dotted: Any) -> None:
    settings = settings_of(stock.work / "lm")
    for key, value in dotted.items():
        group, name = key.split("__")
        settings[group][name] = value
    store(stock.work / "lm", settings)


def _pickles() -> Iterator[Case]:
    def beside(stock: Stock, name: str, listed: bool) -> None:
        for run in ("run", "lm"):
            entry = only_entry(stock.work / run)
            (entry / name).parent.mkdir(parents=True, exist_ok=True)
            (entry / name).write_bytes(bomb())
            if listed:
                seal(entry, {name: bomb()})

    for name in ("agent.pt", "agent.pkl", "other.pickle", "data.bin", "x.npy"):
        for listed in (False, True):
            quick = ("evaluate", "resume") if name == "agent.pt" else ()
            text = f"a pickle {name} in an entry" + ", and in its manifest" * listed
            make = partial(beside, name=name, listed=listed)
            yield Case(text, make, (*CONTROL, *LANGUAGE), quick)

    def inside(stock: Stock, name: str) -> None:
        for run in ("run", "lm"):
            entry = only_entry(stock.work / run)
            (entry / name).write_bytes(bomb())
            seal(entry)

    yield Case(
        "agent.safetensors is a pickle", partial(inside, name="agent.safetensors"),
        (*CONTROL, *LANGUAGE), ("evaluate", "resume lm"),
    )  # fmt: skip

    def upward(stock: Stock, name: str) -> None:
        entry = only_entry(stock.work / "run")
        seal(entry, {name.replace("ABS", str(stock.victim)): b"the user's file.txt\n"})

    for name in ("../../../../../victim/file.txt", "ABS/file.txt", "../x.safetensors"):
        yield Case(f"an entry's manifest lists {name}", partial(upward, name=name), CONTROL)

    def old_format(stock: Stock) -> None:
        """An entry that says it is of another format, with pickles in it."""
        entry = only_entry(stock.work / "run")
        manifest = entry / "manifest.json"
        manifest.write_text(json.dumps({"format": "torchrl.checkpoint", "format_version": 1}))
        for name in ("planted.pkl", "pickle.pt", "state.pt"):
            (entry / name).write_bytes(bomb())

    yield Case("pickles in an entry of another format", old_format, CONTROL, ("evaluate",))

    def study(stock: Stock) -> None:
        (stock.work / "outputs" / "sw" / "study.journal").write_bytes(bomb())

    yield Case("study.journal is a pickle", study, ("sweep", "search", "ls sweep"), ("search",))

    def submitted(stock: Stock) -> None:
        """An outcome for every process that may come."""
        folder = stock.work / "outputs" / "sw" / ".submitit"
        folder.mkdir()
        first = folder / "0_0_result.pkl"
        first.write_bytes(bomb())
        now = os.getpid()
        for pid in range(now, now + 1500):
            os.link(first, folder / f"{pid}_0_result.pkl")
        for job in ("seed=0", "seed=1"):
            shutil.rmtree(stock.work / "outputs" / "sw" / job)

    yield Case(
        "outcomes planted in .submitit", submitted, ("sweep, submitit",), codes=(0, 1, 2), slow=True
    )


def _models() -> Iterator[Case]:
    def bin_only(stock: Stock) -> None:
        for path in (stock.work / "model").glob("*.safetensors"):
            path.with_name("pytorch_model.bin").write_bytes(bomb())
            path.unlink()

    def bin_too(stock: Stock) -> None:
        for name in ("pytorch_model.bin", "training_args.bin", "optimizer.pt", "rng_state.pth"):
            (stock.work / "model" / name).write_bytes(bomb())

    def auto_map(stock: Stock) -> None:
        model = stock.work / "model"
        plant(model, "evil_model.py")
        autos = ("AutoConfig", "AutoModelForCausalLM", "AutoModel", "AutoTokenizer")
        named = dict.fromkeys(autos, "evil_model.Evil")
        edit_json(model / "config.json", auto_map=named)
        generation = {"auto_map": named, "custom_generate": "evil_model.py"}
        (model / "custom_generate").mkdir()
        plant(model / "custom_generate", "generate.py")
        (model / "generation_config.json").write_text(json.dumps(generation))

    def unknown_model(stock: Stock) -> None:
        auto_map(stock)
        edit_json(stock.work / "model" / "config.json", model_type="evil_type")

    def tokenizer(stock: Stock) -> None:
        model = stock.work / "model"
        plant(model, "evil_tokens.py")
        named = {"AutoTokenizer": ["evil_tokens.Evil", "evil_tokens.Evil"]}
        path = model / "tokenizer_config.json"
        edit_json(path, auto_map=named, tokenizer_class="EvilTokenizer")

    def template(stock: Stock) -> None:
        text = (
            "{{ cycler.__init__.__globals__.os.system('echo ran >> \"$KLRL_MARK\"') }}"
            "{% for message in messages %}{{ message['content'] }}{% endfor %}"
        )
        (stock.work / "model" / "chat_template.jinja").write_text(text)

    def adapter(stock: Stock) -> None:
        (stock.work / "model" / "adapter_config.json").write_text(
            json.dumps({"peft_type": "LORA", "base_model_name_or_path": "../evil", "auto_mapping": {
                "base_model_class": "Evil", "parent_library": "evil_adapter"}})
        )  # fmt: skip
        (stock.work / "model" / "adapter_model.bin").write_bytes(bomb())
        plant(stock.work, "evil_adapter.py")

    def classifier(stock: Stock) -> None:
        folder = stock.work / "lm" / "judge"
        shutil.copytree(stock.work / "model", folder)
        plant(folder, "evil_judge.py")
        named = dict.fromkeys(("AutoConfig", "AutoModelForSequenceClassification"), "evil_judge.E")
        edit_json(folder / "config.json", auto_map=named)
        (folder / "pytorch_model.bin").write_bytes(bomb())
        set_in(stock.work / "lm", env__reward="model:lm/judge")

    def tokens_away(stock: Stock) -> None:
        model = stock.work / "model"
        edit_json(model / "tokenizer_config.json", tokenizer_file="/etc/passwd",
                  vocab_file="../../victim/file.txt")  # fmt: skip

    def shards(stock: Stock) -> None:
        model = stock.work / "model"
        weights = next(model.glob("*.safetensors"))
        names = json.loads(weights.read_bytes()[8:].partition(b"}}")[0].decode() + "}}")
        index = {name: "../../victim/file.txt" for name in names if name != "__metadata__"}
        (model / "model.safetensors.index.json").write_text(
            json.dumps({"metadata": {}, "weight_map": index})
        )
        weights.rename(model / "x.safetensors")

    quick = ("evaluate lm",)
    for name, make in (
        ("weights are a pickle alone", bin_only),
        ("pickles beside the weights", bin_too),
        ("auto_map in config.json", auto_map),
        ("auto_map, model_type unknown", unknown_model),
        ("a tokenizer with code", tokenizer),
        ("a chat template that calls os", template),
        ("adapters that name a module", adapter),
        ("a reward model with code", classifier),
        ("a tokenizer that leads away", tokens_away),
        ("an index that leads away", shards),
    ):
        yield Case(f"model: {name}", make, LANGUAGE, quick)


# ------------------------------------------------------------------------------------------ links

#: What klrl writes in a run folder, and in which run of the stock it is there.
WRITTEN = (
    *("metrics.jsonl", "samples.jsonl", "manifest.json", "manifest.tmp", "owner.json", "owner.tmp"),
    *(".hydra/config.yaml", ".hydra/config.tmp", ".hydra/overrides.yaml", ".hydra/overrides.tmp"),
    *("metrics.tmp", "samples.tmp", "curves.png", "curves.tmp", "log.txt", "csv/hparams.csv"),
    *("videos/last.mp4", "videos/last.gif", "report/report.html", "report/report.tmp"),
    *("report/summary.csv", "report/differences.csv", "report/Pendulum_v1_curves.svg"),
)
WRITTEN_FOLDERS = (".hydra", "csv", "tensorboard", "videos", "report", "checkpoints/last",
                   "checkpoints/best")  # fmt: skip


def _lead_away(stock: Stock, run: Path, name: str, how: str) -> None:
    """Put a link in the place of a file or folder; what was there is now the user's."""
    path, away = run / name, stock.victim / f"away-{Path(name).name}"
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        shutil.move(path, away)
    elif path.exists():
        shutil.copy2(path, away)
        path.unlink()
    elif name in WRITTEN_FOLDERS or name in (".submitit", "wandb"):
        away.mkdir()
        (away / "file.txt").write_text("the user's\n")
        for inner in ("last.mp4", "last.gif", "report.html", "summary.csv", "scalars"):
            (away / inner).write_text("the user's\n")
    else:
        away.write_text("the user's\n")
    if how == "hard":
        os.link(away, path)
    else:
        path.symlink_to(away)


def _links() -> Iterator[Case]:
    def linked(stock: Stock, name: str, how: str, logger: str = "none", run: str = "run") -> None:
        _lead_away(stock, stock.work / run, name, how)
        if logger != "none":
            set_in(stock.work / run, logger__name=logger)

    def commands(name: str) -> tuple[str, ...]:
        if name.startswith("videos"):
            return ("video", "evaluate")
        if name.startswith("report"):
            return ("report",)
        if name == "samples.jsonl":
            return ("resume lm", "verify", "evaluate lm")
        return ("resume", "evaluate", "ls", "report", "reference")

    for how in ("symbolic", "hard"):
        for name in WRITTEN:
            run = "lm" if name == "samples.jsonl" else "run"
            logger = "csv" if name.startswith("csv") else "none"
            make = partial(linked, name=name, how=how, logger=logger, run=run)
            first = commands(name)[0]
            quick = () if name.startswith("videos") else (first,)
            yield Case(f"{name} is a {how} link", make, commands(name), quick)
    for name in WRITTEN_FOLDERS:
        logger = name if name in ("csv", "tensorboard") else "none"
        make = partial(linked, name=name, how="symbolic", logger=logger)
        quick = () if name in ("videos", "tensorboard") else (commands(name)[0],)
        yield Case(f"{name} is a link to a folder", make, commands(name), quick)

    def wandb(stock: Stock) -> None:
        _lead_away(stock, stock.work / "run", "wandb", "symbolic")
        settings = settings_of(stock.work / "run")
        settings["logger"] = {"name": "wandb", "mode": "offline", "project": "p"}
        store(stock.work / "run", settings)

    yield Case("wandb is a link to a folder", wandb, ("resume, wandb",), slow=True)

    def entries(stock: Stock, name: str) -> None:
        entry = only_entry(stock.work / "run")
        away = stock.victim / f"away-{name}"
        shutil.move(entry / name if name else entry, away)
        (entry / name if name else entry).symlink_to(away)

    for name in ("", "agent.safetensors", "state.json", "manifest.json"):
        text = f"an entry's {name or 'folder'} is a link"
        yield Case(text, partial(entries, name=name), CONTROL, ("resume",))

    def others(stock: Stock) -> None:
        """Another run of the user's keeps its entries on a larger disk; so does this one."""
        disk = stock.victim / "disk"
        shutil.move(stock.work / "other" / "checkpoints", disk)
        (stock.work / "other" / "checkpoints").symlink_to(disk)
        shutil.rmtree(stock.work / "run" / "checkpoints")
        (stock.work / "run" / "checkpoints").symlink_to(disk)

    yield Case("checkpoints leads to another run's disk", others, ("resume",), ("resume",))

    def stagings(stock: Stock) -> None:
        away = stock.victim / "folder"
        away.mkdir()
        (away / "file.txt").write_text("the user's\n")
        for name in ("checkpoints/.staging-0", "checkpoints/last/.frames-1", ".curves.png-x"):
            (stock.work / "run" / name).symlink_to(away)

    yield Case("leftovers are links", stagings, ("resume",), ("resume",))

    def in_sweep(stock: Stock, name: str, how: str) -> None:
        interrupted(_job(stock))
        _lead_away(stock, stock.work / "outputs" / "sw", name, how)

    for name in ("sweep.json", "sweep.tmp", ".lock", "study.journal", "study.journal.lock",
                 "stop", ".stop"):  # fmt: skip
        for how in ("symbolic", "hard"):
            tried = ("search",) if name.startswith("study") else ("sweep", "plan", "report sweep")
            yield Case(
                f"a sweep's {name} is a {how} link", partial(in_sweep, name=name, how=how), tried,
                tried[:1],
            )  # fmt: skip

    def job(stock: Stock) -> None:
        interrupted(_job(stock))
        _lead_away(stock, stock.work / "outputs" / "sw", "seed=0", "symbolic")

    yield Case("a sweep's job folder is a link", job, SWEEP, ("sweep",))

    def job_log(stock: Stock) -> None:
        interrupted(_job(stock))
        _lead_away(stock, _job(stock), "log.txt", "symbolic")

    yield Case("a job's log.txt is a link", job_log, ("sweep, joblib",), slow=True)

    def submitit(stock: Stock) -> None:
        interrupted(_job(stock))
        _lead_away(stock, stock.work / "outputs" / "sw", ".submitit", "symbolic")

    yield Case("a sweep's .submitit is a link", submitit, ("sweep, submitit",), slow=True)


# ----------------------------------------------------------------------------- kinds of files


def _kinds_of_files() -> Iterator[Case]:
    def other(stock: Stock, run: str, name: str, kind: str) -> None:
        path = stock.work / run / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        path.unlink(missing_ok=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        if kind == "pipe":
            os.mkfifo(path)
        elif kind == "folder":
            path.mkdir()
            (path / "file.txt").write_text("x")
        elif kind == "device":
            path.symlink_to("/dev/zero")
        else:
            path.symlink_to(path.name)

    plain = (
        *("metrics.jsonl", "manifest.json", ".hydra/config.yaml", ".hydra/overrides.yaml"),
        *("owner.json", "curves.png", "manifest.tmp", ".hydra/config.tmp", "checkpoints", ".hydra"),
        "checkpoints/last",
    )
    for kind in ("pipe", "folder", "device", "loop"):
        for name in plain:
            quick = ("resume", "ls") if kind in ("pipe", "device") and name in plain[:5] else ()
            yield Case(
                f"{name} is a {kind}", partial(other, run="run", name=name, kind=kind), CONTROL,
                quick, lines=3,
            )  # fmt: skip
        for name in ("samples.jsonl",):
            make = partial(other, run="lm", name=name, kind=kind)
            quick = ("verify",) if kind == "pipe" else ()
            yield Case(f"{name} is a {kind}", make, (*LANGUAGE, *READ_LANGUAGE), quick)
        for name in ("sweep.json", "sweep.tmp", ".lock", "study.journal"):
            make = partial(other, run="outputs/sw", name=name, kind=kind)
            tried = ("search",) if name == "study.journal" else SWEEP
            quick = tried[:1] if kind in ("pipe", "device") else ()
            yield Case(f"a sweep's {name} is a {kind}", make, tried, quick, lines=3)
        for name in ("config.json", "tokenizer.json", "generation_config.json"):
            make = partial(other, run="model", name=name, kind=kind)
            quick = ("evaluate lm",) if kind == "pipe" else ()
            yield Case(f"model: {name} is a {kind}", make, LANGUAGE, quick)

        def in_entry(stock: Stock, name: str, kind: str) -> None:
            entry = only_entry(stock.work / "run")
            other(stock, "run", str(entry.relative_to(stock.work / "run") / name), kind)

        for name in ("agent.safetensors", "state.json", "manifest.json"):
            make = partial(in_entry, name=name, kind=kind)
            quick = ("evaluate", "resume") if kind == "pipe" and name == "state.json" else ()
            yield Case(f"an entry's {name} is a {kind}", make, CONTROL, quick)


# ---------------------------------------------------------------------------------- huge and odd

_DEEP = 20_000


def _texts() -> Iterator[Case]:
    def written(stock: Stock, name: str, text: str | bytes) -> None:
        for path in (stock.work / "run" / name, _job(stock) / name):
            if path.exists():
                path.write_bytes(text if isinstance(text, bytes) else text.encode())

    yamls = {
        "!!python/object": "env: !!python/object/apply:os.system ['echo ran >> \"$KLRL_MARK\"']\n",
        "!!python/name": "env: !!python/name:os.system\n",
        "!!python/module": "env: !!python/module:antigravity\n",
        "a deep list": "[" * _DEEP,
        "a deep block": "\n".join(" " * i + "a:" for i in range(2000)),
        "aliases": "a: &a [x,x]\nb: &b [*a,*a]\nc: &c [*b,*b]\nd: [*c,*c]\n",
        "10 MB": "x: '" + "y" * 10_000_000 + "'\n",
        "a merge": "<<: {a: 1}\n",
        "a huge number": f"seed: {'9' * 5000}\n",
        "a NUL": b"seed: \0\n",
    }
    for name, text in yamls.items():
        make = partial(written, name=".hydra/config.yaml", text=text)
        quick = ("evaluate", "ls", "report") if name in ("!!python/object", "a deep list") else ()
        yield Case(f"config.yaml: {name}", make, CONTROL, quick)
    jsons = {
        "deep": '{"status": ' + "[" * 100_000,
        "20 MB": '{"status": "' + "x" * 20_000_000 + '"}',
        "a huge number": '{"status": "finished", "pid": ' + "9" * 5000 + "}",
        "surrogates": '{"status": "finished", "klrl": "\\ud800", "error": "\\udcff"}',
    }
    for name, text in jsons.items():
        make = partial(written, name="manifest.json", text=text)
        yield Case(f"manifest.json: {name}", make, CONTROL, ("ls",) if name == "deep" else ())
    rows = {
        "deep": "[" * 100_000 + "\n",
        "a line of 20 MB": '{"frames": 1, "x": "' + "x" * 20_000_000 + '"}\n',
        "infinite": '{"frames": 64, "iteration": 1, "eval/return": Infinity}\n',
        "huge numbers": '{"frames": 1e308, "iteration": 1, "time/iteration": 1e308}\n',
        "a million frames of text": '{"frames": "64", "iteration": [1]}\n' * 1000,
        "100,000 metrics": json.dumps({"frames": 64, **{f"m{i}": 0.0 for i in range(100_000)}}),
    }
    for name, text in rows.items():
        make = partial(written, name="metrics.jsonl", text=text)
        yield Case(f"metrics.jsonl: {name}", make, CONTROL)

    def config(stock: Stock, change: Mapping[str, Any]) -> None:
        set_in(stock.work / "run", **change)
        set_in(stock.work / "lm", **{k: v for k, v in change.items() if "__" not in k})

    changes: dict[str, Mapping[str, Any]] = {
        "frames: inf": {"frames": float("inf")},
        "frames: a text": {"frames": "\x1b[2J"},
        "threads: 10**9": {"threads": 10**9},
        "device: cuda:99": {"device": "cuda:99"},
        "hidden: 10**9": {"actor__hidden": [10**9, 10**9]},
        "seed: -1": {"seed": -1},
    }
    for name, change in changes.items():
        yield Case(f"config.yaml: {name}", partial(config, change=change), CONTROL)

    def sweep_json(stock: Stock, text: str) -> None:
        (stock.work / "outputs" / "sw" / "sweep.json").write_text(text)

    for name, text in {
        "deep": "[" * 100_000,
        "a list": "[]",
        "odd": '{"jobs": [{"name": 3}]}',
    }.items():
        yield Case(f"sweep.json: {name}", partial(sweep_json, text=text), SWEEP)


# ----------------------------------------------------------------------------------------- names

ESCAPE = "\x1b]0;pwned\x07\x1b[2J"
HTML = '"></script><img src=x onerror=alert(1)>'
FORMULA = "=HYPERLINK(1)"
MATH = "$\\frac{$"


def _names() -> Iterator[Case]:
    def folder(stock: Stock, name: str) -> None:
        target = os.fsencode(stock.work) + b"/" + os.fsencode(name)
        os.rename(os.fsencode(stock.work / "run"), target)  # noqa: PTH104

    named = {
        "a newline": "a\nklrl: run b",
        "escapes": f"a{ESCAPE}",
        "C1 escapes": "a\x9b2J",
        "no UTF-8": "a\udcff\udcfe",
        "right to left": "a\u202egpj.exe",
        "HTML": HTML.replace("/", "_"),
        "a formula": FORMULA,
        "mathtext": MATH,
        "a dash": "-rf",
    }
    commands = ("evaluate NAME", "resume NAME", "ls", "ls --json", "report NAME", "diff NAME")
    for name, text in named.items():
        quick = commands if name in ("no UTF-8", "escapes") else ("report NAME",)
        yield Case(
            f"a folder named with {name}", partial(folder, name=text), commands, quick, fed=text
        )

    def everywhere(stock: Stock, text: str) -> None:
        run = stock.work / "run"
        edit_json(
            run / "manifest.json", status="failed", error=text, klrl=text, host=text, argv=[text],
            git_commit=text, started=text, wandb_id=text, device=text, resume="exact",
            versions={text: text}, side_failures=[{"part": text, "error": text, "when": text}],
        )  # fmt: skip
        path = stock.work / "outputs" / "sw" / "sweep.json"
        record = json.loads(path.read_text())
        for job in record["jobs"]:
            job.update(error=text, status="failed", overrides=[text], name=text)
        jobs = [*record["jobs"], {**record["jobs"][0], "folder": "missing"}]
        path.write_text(json.dumps({"commands": [text], "command": text, "jobs": jobs}))
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"frames": 192, "iteration": 3, text: 1.0}) + "\n")

    def in_settings(stock: Stock, text: str) -> None:
        set_in(stock.work / "run", env__id=text, actor__activation=text)
        settings = settings_of(stock.work / "run")
        settings[text] = {text: text}
        store(stock.work / "run", settings)

    for name, text in (("HTML", HTML), ("escapes", ESCAPE), ("formulas", FORMULA),
                       ("mathtext", MATH), ("newlines", "a\nb\r\nc")):  # fmt: skip
        reading = (*READ, "report sweep", "ls sweep", "evaluate", "resume", "report, drawn")
        quick = ("ls", "report sweep", "diff", "report, drawn")
        for where, make in (("manifest and sweep.json", everywhere), ("settings", in_settings)):
            yield Case(
                f"{name} in {where}", partial(make, text=text), reading, quick, fed=text, lines=4
            )

    def samples(stock: Stock, text: str) -> None:
        path = stock.work / "lm" / "samples.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        for row in rows:
            row["response"] = row["prompt"] = text
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    commands = ("verify", "report lm", "resume lm")
    make = partial(samples, text=ESCAPE + HTML)
    yield Case("escapes in samples.jsonl", make, commands, codes=(0, 1, 2), fed=ESCAPE)


# ----------------------------------------------------------------------------------------- paths


def _paths() -> Iterator[Case]:
    def sweep_folder(stock: Stock, folder: str) -> None:
        """A job that never began is to begin where sweep.json says."""
        sweep = stock.work / "outputs" / "sw"
        shutil.rmtree(sweep / "seed=0")
        record = json.loads((sweep / "sweep.json").read_text())
        for job in record["jobs"]:
            if job["name"] == "seed=0":
                job.update(folder=folder.replace("ABS", str(stock.victim)), status="waiting")
        (sweep / "sweep.json").write_text(json.dumps(record))

    for folder in ("../../../victim/new", "ABS/new", "ABS", "..", "."):
        quick = ("sweep",) if folder in ("ABS/new", "../../../victim/new") else ()
        make = partial(sweep_folder, folder=folder)
        yield Case(f"sweep.json: folder={folder}", make, SWEEP, quick)

    def wandb_id(stock: Stock) -> None:
        settings = settings_of(stock.work / "run")
        settings["logger"] = {"name": "wandb", "mode": "offline", "project": "../../p"}
        store(stock.work / "run", settings)
        edit_json(stock.work / "run" / "manifest.json", wandb_id="../../../../victim/x")

    yield Case("wandb_id leads away", wandb_id, ("resume, wandb",), slow=True)

    def reference(stock: Stock) -> None:
        """A manifest that says of whom the reference is."""
        for run in ("run", "lm"):
            actor = {"model": "../victim", "name": "x", "init": "${oc.env:KLRL_SECRET}"}
            edit_json(stock.work / run / "manifest.json", reference={"actor": actor})
            settings = settings_of(stock.work / run)
            settings["reference"] = {"name": "checkpoint", "path": "../victim", "which": "last"}
            store(stock.work / run, settings)

    yield Case(
        "reference.path leads away", reference, (*CONTROL, *LANGUAGE), ("resume", "resume lm")
    )


# -------------------------------------------------------------------------------------- searches


def _searches() -> Iterator[Case]:
    def words(stock: Stock) -> None:
        """A trial that was running: its words are the attacker's."""
        plant(stock.work / "outputs" / "sw")
        folder = stock.work / "outputs" / "sw"
        part = "controller=custom", "controller.target=evil:Controller"
        chosen = [*part, f"controller.path={folder}", "kl.coef=0.1"]
        lines = [
            {"op_code": 0, "worker_id": "w", "study_name": "klrl", "directions": [2]},
            {"op_code": 4, "worker_id": "w", "study_id": 0,
             "datetime_start": "2026-01-01T00:00:00.000000"},
            {"op_code": 8, "worker_id": "w", "trial_id": 0,
             "user_attr": {"words": chosen}},
        ]  # fmt: skip
        (folder / "study.journal").write_text("".join(json.dumps(line) + "\n" for line in lines))

    yield Case("study.journal: words of a trial name code", words, ("search",), ("search",))
