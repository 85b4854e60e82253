"""The small jobs of :mod:`benchmarks.same_rows`, and what of conf/ they leave out."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml


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

#: A link, beside them, to the base model of sort_digits.
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
SORT = f"experiment=sort_digits actor.model={MODEL} env.shortest=1 env.longest=2 env.reward=proxy"


def control(name: str, words: str, after: tuple[str, ...] = ()) -> Job:
    """Four iterations of a small control job, with two evaluations."""
    return Job(name, f"{words} {CONTROL}", after)


def language(name: str, words: str, *, task: str = SORT, after: tuple[str, ...] = ("lm",)) -> Job:
    """Four iterations of a small language job; the others come after the first one."""
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
        "env=half_cheetah env.reward_scale=0.1 env.normalize_reward=false "
        "actor=tanh_normal loss=klpen_held loss.max_alpha=2 loss.entropy_coeff=0.01 "
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
        "env=hopper env.reward_scale=0.1 env.normalize_reward=false "
        "kl=none loss=clip loss.reduction=sum loss.loss_critic_type=smooth_l1 "
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
        "advantage=gae loss=klpen_held loss.max_alpha=2 loss.reduction=sequence kl.placement=split "
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
        "controller=schedule",
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
    "logger=tensorboard": "records the same rows; tests/runs/test_loggers.py reads them back",
    "logger=csv": "records the same rows; tests/runs/test_loggers.py reads them back",
    "collector=ray": "with --slow",
    "compile=aot": "with --slow",
    "compile=jit": "takes half a minute; tests/control/test_compiled.py compares it with eager",
    "compile=auto": "is one of the others",
    **dict.fromkeys(
        ("divergence=forward", "divergence=js"),
        "is newer than 0.2.0's records; tests/test_one_program.py and tests/kl hold its numbers",
    ),
    "controller=held": "is newer than 0.2.0's records; tests/kl and tests/runs hold its numbers",
    **dict.fromkeys(
        (
            *("env=walker2d", "env=ant", "env=swimmer", "env=reacher", "env=humanoid"),
            *("env=inverted_pendulum", "env=inverted_double_pendulum"),
        ),
        "is hopper's code on another id; tests/test_mujoco_benchmark.py trains each",
    ),
    **dict.fromkeys(
        (
            "actor=cnn",
            "env=catch",
            "arch=nature",
            "arch=impala",
            "action_mask=info",
            "action_mask=none",
        ),
        "is newer than 0.2.0's records; tests/control/test_observation.py, test_covering.py",
    ),
    **dict.fromkeys(
        ("env=lunar_lander", "env=bipedal_walker", "env=atari", "env=minigrid", "env=dm_control"),
        "needs an extra",
    ),
    "dtype=mixed": "is newer than 0.2.0's records; tests/language/test_mixed.py",
    "baseline=normalized_shaped": "is newer too; tests/train/test_penalty_order.py",
    "loss=klpen_tokens": "is klpen_held with other settings",
    "controller=held_tokens": "is held with other gains",
    **dict.fromkeys(
        (
            *("env=custom", "actor=custom", "loss=custom", "controller=custom"),
            *("advantage=custom", "logger=custom", "estimator=custom", "beta_rule=custom"),
            "divergence=custom",
        ),
        "is the user's own code; tests/extending",
    ),
    "env=instructions": "needs SmolLM2; tests/language/test_instructions.py",
    **dict.fromkeys(
        (
            *("loss=grpo", "loss=dr_grpo", "loss=dapo", "loss=rloo"),
            *("advantage=grpo", "advantage=dr_grpo", "advantage=dapo", "advantage=rloo"),
            *("reduction=response", "baseline=mean"),
        ),
        "is newer too; tests/language/test_objectives.py holds its formula",
    ),
}
#: Folders of conf/ that no job composes as a group of its own.
NO_GROUPS = ("experiment", "launcher", "search")


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
