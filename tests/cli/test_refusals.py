"""What a user sees who gets something wrong: one line, exit 2, nothing written."""

from __future__ import annotations

import resource
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import gymnasium
import pytest

from klrl.__main__ import main
from klrl.base.errors import ConfigError
from klrl.config.overrides import quote_paths
from klrl.runs.rows import read_rows
from tests.conftest import QUICK
from tests.runs.commands import exits


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Run the command line in this process; returns what it said on its way out with 2."""
    with pytest.raises(SystemExit) as stop:
        main(words)
    said = capsys.readouterr()
    assert stop.value.code == 2, said
    assert said.out == ""
    assert len(said.err.strip().splitlines()) == 1
    assert "Traceback" not in said.err
    assert not any(Path("outputs").glob("*"))
    return said.err


WRONG = [
    (["--experimental-rerun", "x"], "--experimental-rerun x: klrl goes on with resume="),
    (["--package", "kl"], "--package kl: only --cfg reads it"),
    (["--resolve"], "--resolve: only --cfg reads it"),
    (["--config-name", "nope"], "klrl: Cannot find primary config 'nope'"),
    (["kl.coff=1"], "kl.coff=1: no such setting; did you mean kl.coef?"),
    (["env=pendulm"], "env=pendulm: no such choice; did you mean pendulum? choices: acrobot,"),
    (["envv=pendulum"], "envv=pendulum: no such setting; did you mean env?"),
    (["kl.coef=abc"], "kl.coef=abc: give a number"),
    (["kl.coef=-1"], "kl.coef=-1.0: out of range; give a finite number >= 0"),
    (["kl.coef=nan"], "kl.coef=nan: out of range"),
    (["kl.coef=inf"], "kl.coef=inf: out of range"),
    (["loss.decrement=1.5"], "loss.decrement=1.5: out of range"),
    (["loss.increment=0.5"], "loss.increment=0.5: out of range; give a finite number >= 1"),
    (["frames=0"], "frames=0: out of range"),
    (["frames=2.5"], "frames=2.5: give a whole number"),
    (["seed=x"], "seed=x: give a whole number"),
    (
        ["loss=clip", "loss.beta=5"],
        "loss.beta=5: loss=clip never reads it; loss=klpen and loss=klpen_held do",
    ),
    (["kl=legacy", "kl.estimator=k3"], "kl=legacy never reads it; kl=retrieve does"),
    (["kl=none", "kl.coef=1"], "kl.coef=1: kl=none never reads it"),
    (["kl.estimator=k3"], "kl.allow_biased=true"),
    (["kl.name=legacy"], "kl.name: set by the choice; choose with kl=..."),
    (["kl=null"], "kl=null: no such choice; choices: legacy, none, retrieve"),
    (["kl=none", "reference=checkpoint", "reference.path=x"], "nothing reads it here"),
    (["loss.samples_mc_kl=3"], "set loss.kl_old=sampled"),
    (["loss.separate_losses=true"], "set actor.share_trunk=true"),
    (["loss.samples_mc_entropy=3"], "only actor=tanh_normal lacks"),
    (["eval.every=0", "eval.episodes=3"], "eval.every=0 never evaluates"),
    (["eval.evaluations=0", "eval.final=3"], "nor does eval.evaluations=0"),
    (["eval.every=3", "eval.share=0.2"], "eval.share: nothing reads it here: eval.every says when"),
    (["eval.every=3", "eval.evaluations=2"], "eval.every says when to evaluate"),
    (["experiment=sort_digits", "eval.steps=9"], "a response is one step; set eval.episodes"),
    (["eval.share=0"], "eval.share=0.0: out of range; give a finite number > 0"),
    (["reference=checkpoint"], "reference.path: has no value"),
    (["reference=checkpoint", "reference.path=nope"], "reference.path=nope: no such folder"),
    (["resume=nope"], "resume=nope: no such folder"),
    (["env=gym"], "env.id: has no value"),
    (["env=gym", "env.id=Pendulun-v1"], "did you mean Pendulum-v1?"),
    (["env=gym", "env.id=nowhere.at:All-v0"], "No module named 'nowhere'"),
    (["env.kwargs.gg=3"], "unexpected keyword argument 'gg'"),
    (["env=gym", "env.id=LunarLander-v3"], "pip install 'klrl[box2d]'"),
    (["device=tpu"], "device=tpu: choose auto, cpu or cuda"),
    (["device=cuda:1"], "device=cuda:1: klrl computes on the first CUDA device that it sees; set"),
    (["device=cuda:"], "device=cuda:: choose auto, cpu or cuda"),
    (["actor=categorical"], "actor=categorical: the actions of env.id=Pendulum-v1 are continuous"),
    (["env=cartpole", "actor=normal"], "are discrete; choose actor=categorical"),
    (["env=cartpole", "actor.init_std=2"], "has discrete actions; drop it"),
    (["learner.minibatches=7"], "8 x 128 = 1024 frames; choose a divisor"),
    (["actor.hidden=[64,0]"], "give widths >= 1"),
    (["kl.placement=split"], "kl.placement=split: needs the exact KL"),
    (["kl.placement=loss", "kl.apply=step"], "kl.placement=loss puts no penalty in the reward"),
    (["kl.coef=0", "controller=dual"], "kl.coef=0: controller=dual multiplies it"),
    (["kl.coef=1e-5", "controller=held"], "kl.coef=1e-05: controller=held multiplies it"),
    (["controller=held", "controller.limit=0"], "controller.limit=0.0: out of range"),
    (["controller=held", "controller.unit=nats"], "choose one of step, token, sequence"),
    (["controller=held", "controller.unit=token"], "language only; a frame is a step"),
    (["controller=dual", "controller.unit=sequence"], "controller.unit=sequence: language only"),
    (["loss=klpen", "loss.unit=sequence"], "loss.unit=sequence: language only"),
    (["loss=grpo"], "loss.reduction=response: language only, as are loss=grpo, dr_grpo,"),
    (["controller=fixed", "controller.unit=step"], "controller=fixed never reads it"),
    (["kl=none", "controller=dual"], "kl=none has no controller"),
    (["loss.gain=1"], "only loss.beta_rule=proportional reads it"),
    (["loss=klpen_held", "loss.increment=3"], "reads loss.gain instead"),
    (["actor.init=nope"], "actor.init=nope: no such folder"),
    (["experiment=pendulum_finetune"], "actor.init: has no value"),
    (["experiment=distill"], "reference.path: has no value"),
    (["experiment=distill_text"], "reference.path: has no value"),
    (["experiment=distill", "reference.path=nope"], "reference.path=nope: no such folder"),
    (
        ["advantage.reward_weight=0", "kl=none"],
        "advantage.reward_weight=0: with kl=none there is nothing to learn from; use kl=retrieve",
    ),
    (["advantage.reward_weight=0", "kl.coef=0"], "with kl.coef=0 there is nothing to learn from"),
    (
        ["advantage.reward_weight=0", "kl.coef=0", "controller=schedule", "controller.end=0"],
        "with kl.coef=0 there is nothing to learn from",
    ),
    (["optim.lr_floor=1"], "above optim.lr=0.001"),
    (["loss.beta=1e9"], "start inside the bounds"),
    (["kl.coef=0.1,0.2"], "add -m"),
    (["-m", "kl.coef=0.1,-1"], "kl.coef=-1.0: out of range"),
    (["-m", "resume=x"], "drop -m"),
    (["+optim=inf"], "optim=inf: no such choice"),
    (["--cfg"], "argument --cfg/-c: expected one argument"),
    (["--cfg", "nope"], "invalid choice: 'nope'"),
    (["optim.lr=" + "9" * 400], "optim.lr=99"),
    (["frames=" + "9" * 400], "out of range; give a number below 2**63 in size"),
    (["seed=9223372036854775808"], "seed=9223372036854775808: out of range"),
    (["threads=9999999999"], "threads=9999999999: out of range"),
    (["actor.hidden=${kl}"], "give a list"),
    (["actor.hidden=[99999999999]"], "actor.hidden=[99999999999]: give widths"),
    (["env.kwargs.render_mode=human"], "klrl evaluate RUN --video films the trained policy"),
    (["hydra.run.dir=" + "x" * 300], "File name too long"),
    (["-m", "seed=0,1", "hydra.sweep.dir=" + "x" * 300], "File name too long"),
    (["-m", "seed=0,1", "sweep=" + "x" * 300], "give a shorter path"),
    (["reference=shuffle(1)"], "reference=shuffle(1): "),
    (["+foo=1"], "foo: no such setting"),
    (["+kl.foo=1"], "kl.foo: no such setting; drop it"),
    (["++kl.coeff=1"], "kl.coeff: no such setting; drop it"),
    (["+resume=nope"], "resume=nope: no such folder"),
    (["kl.coef="], "kl.coef=: give a number"),
    (["frames=null"], "frames=None: give a whole number"),
    (["experiment=null"], "experiment=null: no such choice"),
    (["env.kwargs.g=abc"], "its first step fails"),
    (["env=gym", "env.id=Ant-v2"], "env.id=Ant-v2"),
    (["hydra.run.dir=/proc/nope"], "hydra.run.dir=/proc/nope: cannot be written"),
    (["-m", "seed=0,1", "hydra.run.dir=x"], "a sweep never reads it; give hydra.sweep.dir"),
    (["launcher=joblib"], "launcher=joblib: only a sweep reads it; add -m"),
    (["sweep=a"], "sweep=a: only a sweep reads it; add -m"),
    (["-m", "hydra/launcher=joblib"], "klrl has its own; choose launcher=..."),
    (["-m", "hydra.sweep.subdir=x"], "klrl names the jobs' folders"),
    (["-m", "launcher=slurm"], "no such choice"),
    (["-m", "launcher.n_jobs=2"], "launcher=joblib does"),
    (["-m", "launcher=joblib", "launcher.n_jobs=0"], "launcher.n_jobs=0: out of range"),
    (["-m", "sweep=/tmp/a"], "sweep=/tmp/a: give a name"),
    (["-m", "sweep=a,b"], "sweep=a,b: give one name"),
    (["-m", "launcher=joblib,ray"], "a sweep has one launcher; give one"),
    (["-m", "sweep=../a"], "sweep=../a: give a name"),
    (["-m", "sweep=a", "hydra.sweep.dir=b"], "drop one of the two"),
    (["-m", "kl.coef=interval(0,1)"], "add search=optuna"),
    (["--config-path", "/tmp"], "use --config-dir"),
    (["--cfg", "job", "kl.coff=1"], "did you mean kl.coef?"),
    (["logger.project=a/b"], "logger.project=a/b: give 1 to 128"),
    (["logger.also=[wandb]"], "logger.also=[wandb]: may hold tensorboard, csv; wandb is chosen"),
    (["logger.also=[csv,csv]"], "logger.also=[csv,csv]: csv is there already; name it once"),
    (["logger=[wandb,csv]"], "logger=[wandb,csv]: give one choice, as in logger=wandb logger.also"),
    (["kl=[legacy,retrieve]"], "kl=[legacy,retrieve]: give one choice, as in kl=legacy"),
    (["kl=legacy", "seed=1", "kl=retrieve"], "kl=legacy kl=retrieve: give one choice of kl"),
    (["-m", "env=pendulum", "env=cartpole,acrobot"], "env=pendulum env=cartpole,acrobot: give one"),
    (["actor=gru"], "actor=gru: no such choice; klrl has no recurrent policy: "),
    (["learning_rate=1"], "learning_rate=1: no such setting; did you mean optim.lr?"),
    (["total_timesteps=9"], "total_timesteps=9: no such setting; did you mean frames?"),
    (["collector.top_p=.9"], "collector.top_p=.9: no such setting; klrl samples from all of the"),
    (["collector.stop=x"], "collector.stop=x: no such setting; a response ends with an EOS"),
    (["optim.warmup=9"], "optim.warmup=9: no such setting; the learning rate falls from optim.lr"),
    (["optim.warmup_steps=9"], "from optim.lr to optim.lr_floor, without a warm-up"),
    (["experiment=text", "env.data=[a,b]"], "env.data=[a,b]: give one value; put the files into"),
    (["env.id=[a,b]"], "env.id=[a,b]: give one value"),
    (["foo"], "foo: not a setting; write KEY=VALUE"),
    (["pendulum"], "pendulum: not a setting; did you mean env=pendulum?"),
    (["frames=3", "none"], "none: not a setting; did you mean kl=none or logger=none?"),
    (["evalute", "outputs/a"], "evalute: no such command; did you mean evaluate?"),
    (["kl.target=0.1"], "did you mean controller.target (controller=adaptive, dual or held)?"),
    (["kl.target=1", "controller=dual"], "no such setting; did you mean controller.target?"),
    (["kl.horizon=3"], "did you mean controller.horizon (controller=adaptive)?"),
    (["lr=1"], "did you mean optim.lr, or controller.lr (controller=dual)?"),
    (["num_envs=3"], "num_envs=3: no such setting; did you mean env.num_envs?"),
    (["actor.r=3", "experiment=sort_digits"], "did you mean actor.lora.r?"),
    (["actor.lora.r=3"], "actor.lora.r=3: actor=mlp never reads it; actor=causal_lm does"),
    (["actor.hidden=64"], "actor.hidden=64: give a list, as in actor.hidden=[64]"),
    (["actor.hidden=64,32"], "actor.hidden=64,32: give a list, as in actor.hidden=[64,32]"),
    (["+kl.coef=1"], "+kl.coef: the setting exists already; drop the +"),
    (["env.kwargs=3"], "env.kwargs=3: give a dictionary, as in 'env.kwargs={name: value}'"),
    (
        ["env=gym", "env.id=ALE/Pong-v5"],
        "env.id=ALE/Pong-v5: not registered; an environment that a module registers is given as "
        "env.id=module:ALE/Pong-v5",
    ),
    (["env=gym", "env.id=gymnasium:Foo-v0"], "env.id=gymnasium:Foo-v0: Environment `Foo` doesn't"),
    (["--frames", "3"], "--frames: no such flag"),
    (["--evn=pendulum"], "--evn=pendulum: no such flag"),
    (["--kl.coeff=0.1"], "kl.coeff=0.1: no such setting; did you mean kl.coef?"),
    (["--config-nme=3"], "--config-nme=3: no such flag"),
    (["--config-dir", "nowhere"], "--config-dir nowhere: no such folder"),
    (["experiment=nope"], "choices: distill, distill_text, pendulum_finetune, pendulum_quick"),
]


@pytest.mark.integration
@pytest.mark.parametrize(
    ("words", "expected"), WRONG, ids=lambda x: " ".join(x)[:40] if isinstance(x, list) else ""
)
def test_a_wrong_word_is_answered_with_its_remedy(capsys, words, expected) -> None:
    assert expected in refused(capsys, *words)


def test_a_missing_optional_package_is_named(capsys, monkeypatch) -> None:
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda n, *a: None if n == "wandb" else find(n, *a)
    )
    assert "logger=wandb: the package wandb is not installed; pip install wandb" in refused(capsys)


def test_full_errors_on_demand(capsys, monkeypatch) -> None:
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    with pytest.raises(SystemExit) as stop:
        main(["kl.coff=1"])
    assert stop.value.code == 2
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize("word", ["--help", "help"])
def test_help_lists_groups_and_choices(capsys, word: str) -> None:
    with pytest.raises(SystemExit) as stop:
        main([word])
    assert stop.value.code == 0
    told = capsys.readouterr().out
    for word in (
        "pendulum",
        "half_cheetah",
        "tanh_normal",
        "retrieve",
        "legacy",
        "klpen",
        "KEY=VALUE",
    ):
        assert word in told


@pytest.mark.parametrize(
    "words",
    [["--help"], ["kl.coff=1"], ["env=gym", "env.id=Nope-v9"], ["loss=clip", "loss.beta=2"]],
)
@pytest.mark.integration
def test_answers_come_without_torch(words: list[str]) -> None:
    """torch takes seconds to import; its absence is what makes these answers quick."""
    code = (
        "import sys\nfrom klrl.__main__ import main\n"
        f"try: main({words!r})\nexcept SystemExit: pass\n"
        "sys.exit(3 if 'torch' in sys.modules else 0)"
    )
    before = cpu_seconds_of_children()
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0
    took = cpu_seconds_of_children() - before
    assert took < 3, "far above the half second that it takes: something heavy is imported"


def cpu_seconds_of_children() -> float:
    """Of those that have ended; unlike the time on the wall, no matter what else runs here."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return ended.ru_utime + ended.ru_stime


@pytest.mark.parametrize("key", ["hydra.run.dir", "hydra.sweep.dir"])
def test_a_refused_job_deletes_nothing_that_was_there(capsys, key: str) -> None:
    """The refusal comes while the job is built, with the user's own folder as the run folder."""
    Path("mine").mkdir()
    Path("mine/thesis.txt").write_text("years", encoding="utf-8")
    flags = ["-m"] if key == "hydra.sweep.dir" else []
    import klrl.train.loop

    def refuse_late(*args: object, **kwargs: object) -> None:
        raise ConfigError("late: refused")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(klrl.train.loop, "start", refuse_late)
        for words in ([f"{key}=mine"], []):
            with pytest.raises(SystemExit) as stop:
                main([*flags, *QUICK, *words])
            assert stop.value.code == 2
            assert "late: refused" in capsys.readouterr().err
    assert not any(Path("outputs").glob("*"))
    assert [p.name for p in Path("mine").iterdir()] == ["thesis.txt"]


def test_a_refused_job_leaves_no_folder_above_its_own(capsys, monkeypatch) -> None:
    import klrl.train.loop

    def refuse_late(*args: object, **kwargs: object) -> None:
        raise ConfigError("late: refused")

    monkeypatch.setattr(klrl.train.loop, "start", refuse_late)
    assert "late: refused" in refused(capsys, *QUICK, "hydra.run.dir=one/two/three")
    assert not Path("one").exists()


@pytest.mark.integration
def test_the_run_folder_is_read_as_hydra_reads_it(capsys) -> None:
    """Quotes around it, a sign in it that quotes it, the job's settings and the time in it."""
    exits(*QUICK, "frames=128", "hydra.run.dir='lr=1,seed=0'")
    exits("resume=lr=1,seed=0", "frames=256")
    assert read_rows(Path("lr=1,seed=0/metrics.jsonl"))[-1]["frames"] == 256
    exits(*QUICK, "frames=128", "hydra.run.dir=runs/${env.id}_${seed}_${now:%Y}", "seed=3")
    assert Path(f"runs/Pendulum-v1_3_{datetime.now().year}/curves.png").is_file()
    capsys.readouterr()
    assert "hydra.run.dir=${env.it}: " in refused(capsys, *QUICK, "hydra.run.dir=${env.it}")


def test_a_folder_with_dollars_is_no_formula() -> None:
    exits(*QUICK, "frames=128", "hydra.run.dir='a$_{b$'")
    assert Path("a$_{b$/curves.png").is_file()


def test_wandb_is_checked_beforehand(capsys, monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    assert "there is no wandb key" in refused(capsys, "logger.mode=online")
    monkeypatch.setenv("WANDB_MODE", "bogus")
    assert "WANDB_MODE=bogus: choose online" in refused(capsys)


def test_kwargs_may_be_given_as_a_dictionary(capsys) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["env.kwargs={g: 5.0}", "--cfg", "job"])
    assert stop.value.code == 0
    assert "g: 5.0" in capsys.readouterr().out


SPACES = {
    "integers": (gymnasium.spaces.Box(0, 5, (2,), int), gymnasium.spaces.Box(-1, 1, (2,))),
    "a sequence": (
        gymnasium.spaces.Discrete(2),
        gymnasium.spaces.Sequence(gymnasium.spaces.Discrete(3)),
    ),
}


@pytest.mark.parametrize("spaces", SPACES.values(), ids=SPACES.keys())
def test_spaces_that_cannot_be_served_are_refused_beforehand(capsys, spaces) -> None:
    class Odd(gymnasium.Env):
        action_space, observation_space = spaces

        def reset(self, *, seed=None, options=None):
            return self.observation_space.sample(), {}

        def step(self, action):
            return self.observation_space.sample(), 0.0, False, False, {}

    gymnasium.register("klrl-test/Odd-v0", Odd, disable_env_checker=True)
    try:
        assert "wrap the environment" in refused(capsys, "env=gym", "env.id=klrl-test/Odd-v0")
    finally:
        del gymnasium.registry["klrl-test/Odd-v0"]


def test_a_yaml_that_includes_itself_is_refused(capsys) -> None:
    Path("mine/optim").mkdir(parents=True)
    Path("mine/optim/loop.yaml").write_text("defaults:\n  - loop@_here_\n")
    told = refused(capsys, "--config-dir", "mine", "optim=loop")
    assert "optim=loop: nested too deep, or a YAML that includes itself" in told


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["ls", "~nosuchuser/x"], "~nosuchuser/x: no such folder"),
        (["report", "~nosuchuser/x"], "~nosuchuser/x: no such folder"),
        (["evaluate", "~nosuchuser/x"], "RUN=~nosuchuser/x: no such folder"),
        (["diff", "--bits", "~nosuchuser/x", "y"], "RUN=~nosuchuser/x: no such folder"),
        (["resume=~nosuchuser/x"], "resume=~nosuchuser/x: no such folder"),
        ([*QUICK, "actor.init='~nosuchuser/a,b'"], "actor.init=~nosuchuser/a,b: no such folder"),
    ],
)
def test_the_home_of_no_user_is_no_folder(capsys, words: list[str], line: str) -> None:
    assert line in refused(capsys, *words)


def test_the_home_of_no_user_completes_to_nothing(capsys) -> None:
    assert quote_paths(["a=~nosuchuser/b,c"]) == ["a=~nosuchuser/b,c"]
