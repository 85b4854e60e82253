"""Does another version of klrl compute the same? 16 small jobs of both domains, all their rows.

    python -m benchmarks.same_rows --against-tree ../before     # a checkout of the version before
    python -m benchmarks.same_rows --record FOLDER --tree ../before    # the same in two steps
    python -m benchmarks.same_rows --against FOLDER

All numbers of metrics.jsonl must be equal, times left out. Where they are not, job, iteration and
metric of the first difference are told, with both values, and the exit code is 1. The last line
names choices in conf/ and values of settings that no job has: add a word to a job, or a reason to
``LEFT_OUT``. Words of jobs must be valid in both versions.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks.results import ROOT, environment
from benchmarks.rounds import last_words

Row = dict[str, float]
Rows = dict[str, list[Row]]

TIMEOUT = 600
TIMES = "time/"
#: Beside the rows of a record: each job's words.
JOBS_FILE = "jobs.json"


@dataclass(frozen=True)
class Job:
    """One run.

    Attributes:
        name: of its folder, ``runs/NAME``, from where it is started.
        words: for the command line.
        after: jobs whose folders it reads.
    """

    name: str
    words: str
    after: tuple[str, ...] = ()

    @property
    def folder(self) -> Path:
        """Where its rows are: a resumed run goes on in the folder of the first."""
        resumed = dict(word.split("=", 1) for word in self.words.split()).get("resume")
        return Path(resumed or f"runs/{self.name}")

    @property
    def command(self) -> list[str]:
        """What follows ``python -m klrl``."""
        words = self.words.split()
        return words if "resume=" in self.words else [*words, f"hydra.run.dir={self.folder}"]


#: Of the job with a reward function of the user's, in the folder that jobs are started from.
FILES = {
    "prompts.jsonl": "".join(f'{{"prompt": "{i} {7 * i % 10}"}}\n' for i in range(10)),
    "rewards.py": (
        "def score(prompts, responses, rows):\n"
        "    return [(len(r) + sum(map(ord, r)) % 7) / 10 for r in responses]\n"
    ),
}

#: A link, beside them, to the base model that the first language job made.
MODEL = "model"

COMMON = "frames={} eval.every=2 checkpoint.every=2 threads=1 device=cpu logger=none"
CONTROL = (
    f"{COMMON.format(512)} env.num_envs=4 collector.steps=32 learner.epochs=2 "
    "learner.minibatches=4 learner.compile=false actor.hidden=[8,8] optim.lr=0.02 "
    "optim.lr_floor=0.01 eval.episodes=2"
)
LANGUAGE = (
    f"{COMMON.format(64)} collector.prompts=4 collector.group_size=4 collector.max_new_tokens=4 "
    "learner.epochs=2 learner.minibatches=2 optim.lr=0.0005 optim.lr_floor=0.0001 eval.episodes=8"
)
SORT = "experiment=sort_digits env.shortest=1 env.longest=2 env.reward=proxy"


def control(name: str, words: str, after: tuple[str, ...] = ()) -> Job:
    """Four iterations of a small control job, with two evaluations."""
    return Job(name, f"{words} {CONTROL}", after)


def language(name: str, words: str, *, task: str = SORT, after: tuple[str, ...] = ("lm",)) -> Job:
    """Four iterations of a small language job; the first one makes the model of all."""
    return Job(name, f"{task} {words} {LANGUAGE}", after)


#: Two run at a time, in this order; a job comes after those whose folders it reads.
JOBS = (
    language("lm", "", after=()),
    control("main", "env=pendulum"),
    control(
        "clip",
        "env=cartpole loss=clip loss.target_kl=0.001 loss.clip_value=0.2 loss.entropy_coeff=0.01 "
        "kl=legacy reference=ema reference.decay=0.8 controller=schedule optim=adamw "
        "actor.activation=relu",
    ),
    control(
        "held",
        "env=half_cheetah actor=tanh_normal loss=klpen_held loss.entropy_coeff=0.01 "
        "loss.samples_mc_entropy=2 kl.placement=split kl.estimator=exact reference=periodic "
        "reference.every=2 controller=adaptive actor.activation=elu",
    ),
    control(
        "forward",
        "env=pendulum actor=normal loss.beta_rule=forward collector=torchrl kl.apply=step "
        "controller=dual actor.activation=silu loss.loss_critic_type=l1",
    ),
    control(
        "near",
        "env=pendulum env.kwargs.g=14 reference=checkpoint reference.path=runs/main "
        "reference.which=best actor.init=runs/main kl.placement=loss kl.estimator=k2",
        after=("main",),
    ),
    control(
        "shared",
        "env=acrobot actor=categorical actor.share_trunk=true loss.separate_losses=true "
        "kl.estimator=k3 kl.allow_biased=true actor.activation=gelu loss.line_search=back",
    ),
    control(
        "free",
        "env=hopper kl=none loss=clip loss.reduction=sum loss.loss_critic_type=smooth_l1 "
        "loss.normalize_advantage=false",
    ),
    control(
        "sampled",
        "env=gym env.id=MountainCarContinuous-v0 kl=legacy kl.apply=step loss.kl_old=sampled "
        "loss.samples_mc_kl=2 controller=schedule controller.shape=cosine",
    ),
    Job("clip_resumed", "resume=runs/clip frames=768", after=("clip",)),
    language(
        "lm_gae",
        "advantage=gae loss=klpen_held loss.reduction=sequence kl.placement=split "
        "kl.estimator=exact reference=ema reference.decay=0.8 controller=dual optim=adamw",
    ),
    language(
        "lm_lora",
        "actor.lora.r=2 actor.dtype=bfloat16 reference=adapter_off kl.placement=loss "
        "kl.estimator=k3 advantage.baseline=leave_one_out controller=adaptive",
    ),
    language(
        "lm_near",
        "reference=checkpoint reference.path=runs/lm kl=legacy loss=klpen "
        "loss.normalize_advantage=false loss.reduction=token actor.dtype=float64 "
        "collector.scoring=padded controller=schedule",
    ),
    language(
        "lm_periodic",
        "actor.init=runs/lm reference=periodic reference.every=2 kl.estimator=k2 "
        "kl.allow_biased=true loss=klpen loss.beta_rule=forward loss.reduction=token",
    ),
    language(
        "lm_text",
        f"env.data=prompts.jsonl env.reward=rewards:score actor.model={MODEL} "
        "kl=none collector.sampler=wrapper",
        task="experiment=text",
    ),
    Job("lm_gae_resumed", "resume=runs/lm_gae frames=96", after=("lm_gae",)),
)
#: With ``--slow``: what takes half a minute each.
SLOW_JOBS = (
    Job("compiled", f"env=pendulum {CONTROL.replace('compile=false', 'compile=aot')}"),
    control("ray", "env=cartpole collector=ray collector.workers=2"),
)
#: What no job here has, and why.
LEFT_OUT = {
    "logger=wandb": "records the same rows, and needs a second for it",
    "collector=ray": "with --slow",
    "compile=aot": "with --slow",
    "compile=jit": "takes half a minute; tests/control/test_compiled.py compares it with eager",
    "compile=auto": "is one of the others",
}
#: Folders of conf/ that no job composes as a group of its own.
NO_GROUPS = ("experiment", "launcher", "search")


# ---------------------------------------------------------------------------------------- running


def run_jobs(jobs: Sequence[Job], tree: Path, work: Path, at_once: int) -> tuple[Rows, list[Any]]:
    """Run all jobs with a checkout's klrl.

    Args:
        jobs: those that others come after first.
        tree: the checkout.
        work: an empty folder; the base model is cached in it, so that two versions share none.
        at_once: how many run beside each other.

    Returns:
        Rows by job, times left out, and the settings that the runs stored.

    Raises:
        SystemExit: a job failed; the message is the last thing that it said.
    """
    if not (tree / "klrl" / "__init__.py").is_file():
        raise SystemExit(f"{tree}: no klrl/ in it; give a checkout")
    for name, text in FILES.items():
        (work / name).write_text(text)
    started: dict[str, Future[list[Row]]] = {}

    def run(job: Job) -> list[Row]:
        for name in job.after:
            started[name].result()
        if f"actor.model={MODEL}" in job.words:
            made = next((work / "cache").rglob("model.safetensors"))
            (work / MODEL).symlink_to(made.parent)
        return run_job(job, tree, work)

    with ThreadPoolExecutor(at_once) as pool:
        for job in jobs:
            started[job.name] = pool.submit(run, job)
        try:
            rows = {name: future.result() for name, future in started.items()}
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    stored = [work / job.folder / ".hydra" / "config.yaml" for job in jobs]
    return rows, [yaml.safe_load(path.read_text()) for path in stored]


def run_job(job: Job, tree: Path, work: Path) -> list[Row]:
    """Its rows, once it finished."""
    begun = time.perf_counter()
    fixed = {"PYTHONPATH": str(tree), "XDG_CACHE_HOME": str(work / "cache")}
    try:
        done = subprocess.run(
            [sys.executable, "-m", "klrl", *job.command],
            capture_output=True,
            text=True,
            cwd=work,
            env={**environment(), **fixed},
            timeout=TIMEOUT,
        )
    except subprocess.TimeoutExpired as error:
        raise SystemExit(f"{job.name}: not done in {TIMEOUT} s") from error
    if done.returncode:
        raise SystemExit(f"{job.name}: {last_words(done.stderr)} ({' '.join(job.command)})")
    rows = read_rows(work / job.folder / "metrics.jsonl")
    seconds = time.perf_counter() - begun
    print(f"  {job.name}: {len(rows)} rows, {seconds:.1f} s", flush=True)
    return rows


def read_rows(path: Path) -> list[Row]:
    """Lines of a metrics.jsonl without their times."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [timeless(json.loads(line)) for line in lines]


def timeless(row: Row) -> Row:
    return {key: value for key, value in row.items() if not key.startswith(TIMES)}


# -------------------------------------------------------------------------------------- recording


def write_record(folder: Path, jobs: Sequence[Job], rows: Rows) -> None:
    """``NAME.jsonl`` for each job, and the words that made it."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, lines in rows.items():
        text = "".join(json.dumps(row) + "\n" for row in lines)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
    words = {job.name: job.words for job in jobs}
    (folder / JOBS_FILE).write_text(json.dumps(words, indent=1) + "\n", encoding="utf-8")


def read_record(folder: Path, jobs: Sequence[Job]) -> Rows:
    """The same back.

    Raises:
        SystemExit: no record, or one of jobs that had other words.
    """
    if not (folder / JOBS_FILE).is_file():
        raise SystemExit(f"{folder}: no {JOBS_FILE} in it; make it with --record {folder}")
    words = json.loads((folder / JOBS_FILE).read_text(encoding="utf-8"))
    other = [job.name for job in jobs if words.get(job.name) != job.words]
    if other:
        raise SystemExit(f"{folder}: {other[0]} had other words there, or was not run; record anew")
    return {job.name: read_rows(folder / f"{job.name}.jsonl") for job in jobs}


# -------------------------------------------------------------------------------------- comparing


@dataclass(frozen=True)
class Difference:
    """A number that is not the recorded one.

    Attributes:
        job: its name.
        iteration: of the row, from 1.
        metric: its name; empty where a whole row is missing.
        recorded: None where there is none.
        found: None where there is none.
    """

    job: str
    iteration: int
    metric: str
    recorded: float | None
    found: float | None

    def __str__(self) -> str:
        """For a person to read."""
        where = f"{self.job}, iteration {self.iteration}"
        if not self.metric:
            return f"{where}: {'no such row now' if self.found is None else 'a row too many'}"
        recorded, found = (
            "nothing" if value is None else repr(value) for value in (self.recorded, self.found)
        )
        return f"{where}, {self.metric}: {recorded} recorded, {found} now"


def differences(
    job: str, recorded: Sequence[Row], found: Sequence[Row], tolerance: float = 0.0
) -> Iterator[Difference]:
    """What differs between two runs of a job, row by row; both without times."""
    for i in range(max(len(recorded), len(found))):
        before, now = (dict(rows[i]) if i < len(rows) else None for rows in (recorded, found))
        if before is None or now is None:
            yield Difference(job, i + 1, "", before and float(i + 1), now and float(i + 1))
            continue
        for metric in [*before, *(key for key in now if key not in before)]:
            values = before.get(metric), now.get(metric)
            if not equal(*values, tolerance):
                yield Difference(job, i + 1, metric, *values)


def equal(a: float | None, b: float | None, tolerance: float) -> bool:
    """Whether two numbers are the same up to a share of the larger one; nan is nan."""
    if a is None or b is None:
        return a is b
    if math.isnan(a) or math.isnan(b):
        return math.isnan(a) and math.isnan(b)
    return a == b or abs(a - b) <= tolerance * max(abs(a), abs(b))


def compare(recorded: Rows, found: Rows, tolerance: float, first: int) -> bool:
    """Tell the first differences of each job; whether there are none."""
    different = 0
    for name in recorded:
        told = list(differences(name, recorded[name], found[name], tolerance))
        different += bool(told)
        for difference in told[:first]:
            print(difference)
        if len(told) > first:
            print(f"{name}: {len(told) - first} more")
    count = sum(len(rows) for rows in recorded.values())
    verdict = f"{different} of {len(recorded)} jobs differ" if different else "equal"
    print(f"{count} rows of {len(recorded)} jobs: {verdict}")
    return not different


# --------------------------------------------------------------------------------------- coverage


def not_covered(jobs: Sequence[Job], stored: Iterable[Mapping[str, Any]], conf: Path) -> list[str]:
    """Choices of every group, and values of settings with a closed list, that no job has.

    Args:
        jobs: their words say which choices they make.
        stored: the settings that their runs stored, or that their words compose.
        conf: the folder of the YAML files.
    """
    made = {pair for job in jobs for pair in choices(job, conf).items()}
    missing = [
        f"{path.parent.name}={path.stem}"
        for path in sorted(conf.glob("*/*.yaml"))
        if path.parent.name not in NO_GROUPS and (path.parent.name, path.stem) not in made
    ]
    values: dict[str, set[str]] = {}
    for settings in stored:
        for key, value in leaves(settings):
            values.setdefault(key, set()).add(str(value).lower())
    for key, allowed in closed_lists().items():
        # Another setting may have the same last name, as kl.mode and logger.mode.
        if allowed & values.get(key, set()):
            missing += [f"{key}={value}" for value in sorted(allowed - values[key])]
    return [word for word in missing if word not in LEFT_OUT]


def choices(job: Job, conf: Path) -> dict[str, str]:
    """Group -> choice: the defaults, the experiment's, the job's own words."""
    made: dict[str, str] = {}
    words = dict(word.split("=", 1) for word in job.words.split())
    if "resume" in words:
        return made
    for entry in _defaults(conf / "config.yaml"):
        made |= entry
    if "experiment" in words:
        for entry in _defaults(conf / "experiment" / f"{words['experiment']}.yaml"):
            made |= {key.removeprefix("override /"): value for key, value in entry.items()}
    return made | {key: value for key, value in words.items() if key in made}


def _defaults(path: Path) -> list[dict[str, str]]:
    entries = yaml.safe_load(path.read_text(encoding="utf-8"))["defaults"]
    return [entry for entry in entries if isinstance(entry, dict)]


def leaves(settings: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Every setting by its last name."""
    for key, value in settings.items():
        if isinstance(value, Mapping):
            yield from leaves(value)
        else:
            yield key, value


def closed_lists() -> dict[str, set[str]]:
    """The settings that take one of some words, by their last name, with these words."""
    import klrl.config

    found: dict[str, set[str]] = {}
    for schema in vars(klrl.config).values():
        for field in dataclasses.fields(schema) if dataclasses.is_dataclass(schema) else ():
            if "allowed" in field.metadata:
                found.setdefault(field.name, set()).update(field.metadata["allowed"])
    return found


# -------------------------------------------------------------------------------------------- main


def main() -> None:
    args = _parse()
    jobs = (*JOBS, *SLOW_JOBS) if args.slow else JOBS
    if args.only:
        jobs = picked(jobs, args.only)
    if args.record:
        rows, stored = _run(jobs, args.tree, args.at_once)
        write_record(args.record, jobs, rows)
        print(f"recorded in {args.record}")
    else:
        if args.against:
            recorded = read_record(args.against, jobs)
        else:
            recorded, _ = _run(jobs, args.against_tree, args.at_once)
        rows, stored = _run(jobs, args.tree, args.at_once)
        same = compare(recorded, rows, args.tolerance, args.first)
    if not args.only:
        missing = not_covered(jobs, stored, ROOT / "conf")
        print(f"not covered: {', '.join(missing)}" if missing else "every choice is covered")
    sys.exit(0 if args.record or same else 1)


def picked(jobs: Sequence[Job], names: Sequence[str]) -> tuple[Job, ...]:
    """The jobs of these names, and those whose folders they read."""
    wanted, known = list(names), {job.name: job for job in jobs}
    for name in wanted:
        if name not in known:
            raise SystemExit(f"--only {name}: choose among {', '.join(known)}")
        wanted += known[name].after
    return tuple(job for job in jobs if job.name in wanted)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--record", type=Path, metavar="FOLDER", help="run the jobs, keep their rows")
    what.add_argument("--against", type=Path, metavar="FOLDER", help="run them, compare with those")
    what.add_argument("--against-tree", type=Path, metavar="TREE", help="run them with both trees")
    parser.add_argument("--tree", type=Path, default=ROOT, help="a checkout (default: this one)")
    parser.add_argument("--tolerance", type=float, default=0.0, help="relative (default 0)")
    parser.add_argument("--first", type=int, default=1, help="differences told per job (default 1)")
    parser.add_argument("--only", nargs="+", metavar="JOB", help="these jobs, and what they need")
    parser.add_argument("--slow", action="store_true", help="with a compiled job and one on Ray")
    parser.add_argument("--at-once", type=int, default=2, help="jobs at a time (default 2)")
    return parser.parse_args()


def _run(jobs: Sequence[Job], tree: Path, at_once: int) -> tuple[Rows, list[Any]]:
    begun = time.perf_counter()
    print(f"{len(jobs)} jobs with {tree}", flush=True)
    with tempfile.TemporaryDirectory() as work:
        told = run_jobs(jobs, tree.resolve(), Path(work), at_once)
    print(f"  all: {time.perf_counter() - begun:.0f} s", flush=True)
    return told


if __name__ == "__main__":
    main()
