"""The small jobs of :mod:`benchmarks.same_rows`, of both domains."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Job:
    """One run."""

    name: str  # of its folder, ``runs/NAME``, from where it is started
    words: str  # for the command line
    after: tuple[str, ...] = ()  # jobs whose folders it reads

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

#: A link, next to them, to the base model of sort_digits.
MODEL = "model"

#: All by name, since its defaults changed.
HELD = "loss=klpen_held loss.dtarg=0.01 loss.dtarg_per=state loss.max_alpha=2"
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
        f"actor=tanh_normal {HELD} loss.entropy_coeff=0.01 "
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
        f"advantage=gae {HELD} loss.reduction=sequence kl.placement=split "
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
        f"env.data=prompts.jsonl env.reward=rewards:score actor.model={MODEL} kl=none",
        task="experiment=text",
    ),
    Job("lm_gae_resumed", "resume=runs/lm_gae frames=96", after=("lm_gae",)),
)
#: With ``--slow``: what takes half a minute.
SLOW_JOBS = (Job("compiled", f"env=pendulum {CONTROL.replace('compile=false', 'compile=aot')}"),)
