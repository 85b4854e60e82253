"""Run, sweep, model and cache folders of an attacker: what does each command make of them?

    python -m benchmarks.reliability.hostile                # everything
    python -m benchmarks.reliability.hostile --quick        # as tests/reliability does
    python -m benchmarks.reliability.hostile --case '^env.path=RUN' --command evaluate

Honest runs of control and language, a sweep and a model are made once. A hostile copy of them is
given to one command at a time, in a fork under Python's audit hook. Right is: no code of the folder
runs, nothing of it is unpickled, no process starts, nothing is written outside the folder that the
command is to write, the user's other files stay as they are, no variable of the environment is told
or stored, exit code 0 or 2 with a line or two, no traceback, no hang. The same commands do their
work on the honest folders, under the same hook. Exit code 1 where anything is wrong.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import re
import resource
import stat
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from html.parser import HTMLParser
from pathlib import Path

from benchmarks.reliability.ended import Ended
from benchmarks.reliability.hostile_cases import Case, cases
from benchmarks.reliability.hostile_stock import (
    LANGUAGE,
    SAMPLES,
    SECRETS,
    SWEEP,
    Stock,
    import_all,
    table,
)
from benchmarks.reliability.hostile_watch import Watch
from benchmarks.reliability.small_run import FRAMES, WORDS

#: Seconds for one command, and bytes that it may add to the memory of the start.
LIMIT, MEMORY = 15.0, 3_000_000_000
#: A sign before what is no number.
_SIGNED_TEXT = re.compile(r"[-+](?!((\d+\.?\d*|\.\d+)(e[-+]?\d+)?|inf|nan)$)", re.I)
#: What a terminal would carry out.
_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")


@dataclass(frozen=True)
class Command:
    """What a folder is given to; see hostile.yaml."""

    words: str = ""
    load: str = ""
    writes: str = ""
    starts: bool = False
    drawn: bool = False

    def give(self, name: str) -> None:
        """Do it, with the name of the run folder."""
        from klrl.cli.main import main

        if self.load:
            _load(self.load)
            return
        words: list[str] = []
        for word in self.words.split():
            words += _WORDS.get(word, (word.replace("NAME", name),))
        main(words)


def _load(run: str) -> None:
    """``klrl.load_run`` and ``klrl.load_policy``; refused as the command line refuses."""
    import klrl
    from klrl.base.errors import ConfigError
    from klrl.base.text import warn

    refused: ConfigError | None = None
    for look in (
        lambda: klrl.load_run(run).manifest,
        lambda: klrl.load_run(run).rows,
        lambda: klrl.load_run(run).summary,
        lambda: klrl.load_run(run).config,
        lambda: klrl.load_policy(run),
    ):
        try:
            look()
        except ConfigError as error:
            refused = error
    if refused is not None:
        warn(f"klrl: {refused}".encode("utf-8", "backslashreplace").decode())
        raise SystemExit(2)


_WORDS: dict[str, tuple[str, ...]] = {
    "MORE": (f"frames={3 * FRAMES}",),
    "SAMPLES": (f"frames={3 * SAMPLES}",),
    "NEW": (*WORDS, f"frames={FRAMES}", "hydra.run.dir=new"),
    "NEW_LM": (*LANGUAGE, f"frames={SAMPLES}", "hydra.run.dir=new"),
    "SWEEP": SWEEP,
    "SEARCH": (*WORDS, f"frames={FRAMES}", "kl.coef=interval(0.1,0.2)"),
}
COMMANDS = {name: Command(**given) for name, given in table()["commands"].items()}


# --------------------------------------------------------------------------------------- one try


def attempt(stock: Stock, case: Case, name: str) -> tuple[Ended, list[str]]:
    """Give a case to a command; how it ended, and what was wrong."""
    stock.restore()
    case.prepare(stock)
    given = COMMANDS[name]
    writes = given.writes.replace("NAME", case.fed)
    before = {folder: snapshot(folder) for folder in (stock.work, stock.victim)}
    with tempfile.TemporaryFile() as log:
        go = partial(_go, stock, case, given, log.fileno())
        limit = 3 * LIMIT if given.drawn or given.starts else LIMIT
        ended = stock.fork(go, case.cwd, limit, drawn=given.drawn)
        log.seek(0)
        seen = log.read().decode().splitlines()
    wrong = [*dict.fromkeys(seen)][:6]
    wrong += ended.faults(case.codes, most_lines=case.lines + 2 * given.starts)
    if stock.mark.exists():
        wrong.append(f"it ran: {', '.join(dict.fromkeys(stock.mark.read_text().splitlines()))}")
    after = {folder: snapshot(folder) for folder in (stock.work, stock.victim)}
    wrong += [f"victim {each}" for each in changes(before[stock.victim], after[stock.victim])]
    wrong += [
        each
        for each in changes(before[stock.work], after[stock.work])
        if not (writes and each.split(" ", 1)[1].startswith(writes))
    ][:4]
    wrong += _told(stock, case, ended)
    return ended, wrong


def _go(stock: Stock, case: Case, given: Command, log: int) -> None:
    """In the fork."""
    sys.dont_write_bytecode = True
    sys.path[:] = [each for each in sys.path if each]  # as the installed command
    if not given.starts:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    work = stock.work
    planted = [work / each for each in ("run", "lm", "mine", "model", "outputs")]
    writable = [work, stock.tmp, stock.mark]
    writable += [stock.home / each for each in (".cache", ".local", ".config")]
    planted += [stock.victim, work / (case.fed or "run")]
    Watch(log, planted, writable, starts=given.starts).install()
    given.give(case.fed)


# ------------------------------------------------------------------------------------- judgement


def snapshot(folder: Path) -> dict[str, str]:
    """Name -> what it is: kind, mode, time of change and content, of everything in a folder."""
    found: dict[str, str] = {}
    for path in _walk(folder):
        status = path.lstat()
        kind = stat.S_IFMT(status.st_mode)
        told = f"{status.st_mode:o}"
        if kind == stat.S_IFREG:
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            told += f" {status.st_mtime_ns} {digest}"
        elif kind == stat.S_IFLNK:
            told += f" {path.readlink()}"
        found[str(path.relative_to(folder))] = told
    return found


def _walk(folder: Path) -> Iterator[Path]:
    for each in sorted(folder.iterdir()):
        yield each
        if each.is_dir() and not each.is_symlink():
            yield from _walk(each)


def changes(before: dict[str, str], after: dict[str, str]) -> list[str]:
    """What was added, removed and changed."""
    named = [("changed", name) for name in before if after.get(name, before[name]) != before[name]]
    named += [("removed", name) for name in before if name not in after]
    named += [("new", name) for name in after if name not in before]
    return [f"{how}: {name}".replace(": ", " ", 1) for how, name in named]


def _told(stock: Stock, case: Case, ended: Ended) -> Iterator[str]:
    """What is printed, or stored, that may not be."""
    said = ended.out + ended.err
    if found := _CONTROL.search(said):
        yield f"prints {found[0]!r} raw: {said[max(0, found.start() - 40) : found.end() + 20]!r}"
    if "\n" in case.fed and case.fed in said:
        yield f"prints {case.fed!r} raw"
    for key, secret in SECRETS.items():
        if secret in said:
            yield f"prints the value of {key}: {said[: said.index(secret)][-60:]!r}..."
        for folder in (stock.work, stock.home, stock.tmp):
            for path in _walk(folder):
                if path.is_file() and not path.is_symlink() and secret.encode() in _content(path):
                    yield f"stores the value of {key}: {path.relative_to(stock.base)}"
    for path in stock.work.rglob("report.html"):
        if path.is_file():
            page = _Page()
            page.feed(path.read_text(encoding="utf-8", errors="replace"))
            yield from page.wrong
    for path in stock.work.rglob("*.csv"):
        if path.is_file():
            yield from _formulas(path)


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes() if path.stat().st_size < 5_000_000 else b""
    except OSError:
        return b""


class _Page(HTMLParser):
    """Finds a tag of a name that was fed."""

    def __init__(self) -> None:
        super().__init__()
        self.wrong: list[str] = []

    def handle_starttag(self, tag: str, attrs: Sequence[tuple[str, str | None]]) -> None:
        """Any tag with a handler of events is no tag of klrl's."""
        if any(name.startswith("on") for name, _ in attrs):
            self.wrong.append(f"report.html: <{tag} {attrs}>")


def _formulas(path: Path) -> Iterator[str]:
    with path.open(newline="", encoding="utf-8", errors="replace") as file:
        for row in csv.reader(file):
            for cell in row:
                if cell[:1] in ("=", "@", "\t", "\r") or _SIGNED_TEXT.match(cell):
                    yield f"{path.name}: the cell {cell[:40]!r}"


# ----------------------------------------------------------------------------------------- table


def chosen(args: argparse.Namespace) -> list[tuple[Case, str]]:
    """The pairs of case and command that are asked for."""
    pairs = []
    for case in cases():
        if args.case is not None and re.search(args.case, case.name) is None:
            continue
        wanted = case.quick if args.quick else case.commands
        if case.slow and not args.slow and args.case is None:
            continue
        pairs += [(case, name) for name in wanted if args.command in (None, name)]
    return pairs


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; 1 where anything is wrong."""
    args = _parser().parse_args(argv)
    pairs = chosen(args)
    if not pairs:
        raise SystemExit(f"no such case or command; cases: {[case.name for case in cases()]}")
    begun = time.monotonic()
    import_all()
    records = []
    with tempfile.TemporaryDirectory(prefix="hostile-") as folder:
        base = Path(folder).resolve() / "base"
        base.mkdir()
        stock = Stock(base)
        print(f"{len(pairs)} pairs; stock made in {time.monotonic() - begun:.0f} s", flush=True)
        for case, name in pairs:
            ended, wrong = attempt(stock, case, name)
            records.append({"case": case.name, "command": name, "wrong": wrong})
            told = "; ".join(wrong) or "ok"
            if wrong or not args.wrong:
                shown = ascii(f"{case.name} x {name} -> exit {ended.code}, {told}")
                print(shown[1:-1][:600], flush=True)
            if args.case is not None and args.command is not None:
                print(ascii(ended.out), ascii(ended.err), sep="\n")
        stock.restore()
    if args.json:
        Path(args.json).write_text(json.dumps(records, indent=1))
    bad = [each for each in records if each["wrong"]]
    counted = Counter(str(each["case"]) for each in bad)
    took = time.monotonic() - begun
    print(f"{len(records)} pairs, {len(bad)} wrong in {len(counted)} cases, {took:.0f} s")
    return 1 if bad else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--quick", action="store_true", help="the most telling commands of each case")
    add("--slow", action="store_true", help="those too that start processes, or wait")
    add("--case", help="only cases in whose name this expression is found")
    add("--command", choices=COMMANDS, help="only this command")
    add("--wrong", action="store_true", help="print only what is wrong")
    add("--json", metavar="FILE", help="write the table as JSON too")
    return parser


if __name__ == "__main__":
    sys.exit(main())
