"""The YAML files against the schemas: a choice that is added is checked the day it is added."""

import importlib.util
import os
import re
import signal
import time
from dataclasses import asdict, fields
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from omegaconf.errors import ConfigAttributeError

from klrl.base.errors import ConfigError, Interrupted
from klrl.config import GROUPS, EvalConfig, LanguageConfig, Ungrouped, conf_dir
from klrl.config.checks import to_config
from klrl.config.compose import Composer, compose
from klrl.config.explain import described
from klrl.config.given import Given
from klrl.config.nodes import notes_of
from klrl.config.overrides import parse
from klrl.config.rules.unread import check_all_read
from klrl.control.run.job_checks import check_env
from klrl.runs.resume import stored_config
from tests.runs.commands import child

FILES = sorted(conf_dir().rglob("*.yaml"))
TEXT = ["env.data=prompts.jsonl", "env.reward=rewards:score", "actor.model=somewhere"]
CLONE, SFT = ["data=somewhere"], ["data=rows.jsonl", "actor.model=somewhere"]
#: Choices that ask for a setting.
ASKING = {
    **{(group, "custom"): [f"{group}.target=package.module:Name"] for group in GROUPS},
    ("env", "custom"): ["env.target=gymnasium.envs.classic_control.cartpole:CartPoleEnv"],
    ("experiment", "clone"): CLONE,
    ("experiment", "sft"): SFT,
    ("collector", "demonstrations"): ["experiment=clone", *CLONE],
    ("collector", "answers"): ["experiment=sft", *SFT],
    ("loss", "nll"): ["experiment=clone", *CLONE],
    ("env", "gym"): ["env.id=CartPole-v1"],
    ("reference", "checkpoint"): ["reference.path=somewhere"],
    ("actor", "cnn"): ["env=catch"],
    ("actor", "categorical"): ["env=cartpole"],
    ("experiment", "finetune"): ["actor.init=somewhere"],
    ("experiment", "distill"): ["reference.path=somewhere"],
    ("experiment", "distill_text"): ["reference.path=somewhere"],
    **{("experiment", name): TEXT for name in ("text", "grpo", "dppo")},
    ("env", "text"): ["experiment=text", *TEXT],
    ("env", "sort_digits"): ["experiment=sort_digits"],
    ("env", "instructions"): ["experiment=smollm"],
    ("actor", "causal_lm"): ["experiment=sort_digits"],
    ("collector", "sampler"): ["experiment=sort_digits"],
    ("advantage", "group"): ["experiment=sort_digits"],
    ("reference", "adapter_off"): ["experiment=sort_digits", "actor.lora.r=4"],
    ("reference", "model"): ["experiment=sort_digits", "reference.path=somewhere"],
    **{
        (group, name): ["experiment=sort_digits"]
        for group in ("loss", "advantage")
        for name in ("grpo", "dr_grpo", "dapo", "rloo")
    },
    ("loss", "dppo"): ["experiment=sort_digits"],
}
#: Presets of packages that klrl does not install by itself -> (the package, the extra).
EXTRAS = {
    "atari": ("ale_py", "atari"),
    "minigrid": ("minigrid", "minigrid"),
    **dict.fromkeys(("lunar_lander", "bipedal_walker"), ("Box2D", "box2d")),
}
#: Groups whose choices serve control and language alike.
SHARED = ("reference", "kl", "controller", "loss", "learner", "optim", "logger")
#: Their choices of one domain, or of a test of their own.
OF_ONE = {("loss", "trpo"), ("loss", "nll"), ("reference", "custom"), ("reference", "model")}


@pytest.mark.integration
@pytest.mark.parametrize(
    ("group", "choice"), [(g, c) for g in (*GROUPS, "experiment") for c in described(g)]
)
def test_every_choice_composes_and_fits_its_schema(group: str, choice: str) -> None:
    config = to_config(compose([f"{group}={choice}", *ASKING.get((group, choice), [])]))
    assert config.frames_per_iteration % config.learner.minibatches == 0
    check_all_read(config, [])  # no preset has a setting that its job does not read


def installed(preset: str) -> bool:
    return preset not in EXTRAS or importlib.util.find_spec(EXTRAS[preset][0]) is not None


@pytest.mark.parametrize("preset", EXTRAS)
def test_a_missing_package_is_told_with_its_extra(preset: str) -> None:
    if installed(preset):
        pytest.skip("it is installed")
    config = to_config(compose([f"env={preset}"]))
    with pytest.raises(ConfigError, match=rf"pip install 'klrl\[{EXTRAS[preset][1]}\]'$") as told:
        check_env(config.env, config.actor, frozenset())
    assert "\n" not in str(told.value)


@pytest.mark.integration
@pytest.mark.parametrize(
    ("group", "choice"),
    [(g, c) for g in SHARED for c in described(g) if (g, c) not in OF_ONE],
)
def test_every_shared_choice_goes_with_a_language_policy(group: str, choice: str) -> None:
    # experiment=smollm sets the most, of it what kl=none and kl=legacy do not have, and says so.
    experiment = "sort_digits" if group == "kl" else "smollm"
    asked = ASKING.get((group, choice), [])
    config = to_config(compose([f"experiment={experiment}", f"{group}={choice}", *asked]))
    assert isinstance(config, LanguageConfig)
    assert config.frames_per_iteration == config.collector.prompts * config.collector.group_size


def test_every_setting_of_no_group_says_what_it_does() -> None:
    known = {f.name for f in fields(Ungrouped)} - {*GROUPS, "eval", "checkpoint"}
    known |= {f"eval.{f.name}" for f in fields(EvalConfig)} | {"checkpoint.every"}
    assert notes_of(Ungrouped).keys() == known


PRESETS = [path for path in FILES if path.name != "config.yaml"]


@pytest.mark.parametrize("path", PRESETS, ids=lambda p: str(p.relative_to(conf_dir())))
def test_every_setting_has_a_one_line_comment(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    assert any(line.startswith("# ") and not line.startswith("# @") for line in lines)
    body = lines[lines.index("  - _self_") + 1 :] if "  - _self_" in lines else lines
    block_openers = re.compile(r"^\s*[\w/]+:\s*(\{.*\})?$")
    preset = "# @package _global_" in lines
    for line in body:
        setting = re.match(r"^\s*\w+: ", line)
        if setting and not line.lstrip().startswith("-") and not (preset and _repeats(line)):
            assert "  # " in line or block_openers.match(line), f"{path.name}: {line}"


def _repeats(line: str) -> bool:
    """A preset's value of a setting that its own group's YAML explains."""
    return bool(
        re.match(r"^(  num_envs|frames|advantage|optim|collector|learner|eval|checkpoint): ", line)
    )


def test_whole_floats_are_frames() -> None:
    assert to_config(compose(["frames=1e6"])).frames == 1_000_000


def test_the_last_rollout_is_whole() -> None:
    config = to_config(compose(["frames=1025"]))
    assert (config.frames_per_iteration, config.iterations) == (1024, 2)


@pytest.mark.parametrize(
    "words",
    [
        ["kl=legacy"],
        ["kl=none", "loss=clip", "optim=adamw"],
        ["env=cartpole", "actor=categorical"],
        ["experiment=sort_digits", "actor.lora.r=2", "actor.lora.target_modules=[q_proj]"],
        ["experiment=text", *TEXT, "advantage=gae", "loss=klpen"],
    ],
)
def test_a_stored_config_reads_back_as_it_was(tmp_path: Path, words: list[str]) -> None:
    config = to_config(compose(words))
    (tmp_path / ".hydra").mkdir()
    OmegaConf.save(OmegaConf.create(asdict(config)), tmp_path / ".hydra" / "config.yaml")
    assert stored_config(tmp_path) == config
    assert stored_config(tmp_path, [Given("frames=7e5")]).frames == 700_000


def _bomb(path: Path) -> None:
    """Nine aliases of nine aliases, nine times."""
    lines = ["env:", "  kwargs:", "    a0: &a0 [1, 1]"]
    lines += [f"    a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 10)]
    path.write_text("\n".join(lines))


@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    ("make", "told"),
    [
        (_bomb, "has an alias"),
        (lambda path: path.write_text("kl: &a {coef: 1}\nenv: {kwargs: *a}"), "has an alias"),
        (lambda path: path.write_text("a: " + "[" * 10**5), "is nested too deep"),
        (lambda path: path.touch() or os.truncate(path, 30 * 10**9), "30,000,000,000 bytes"),
        (os.mkfifo, "it is not a regular file"),
    ],
    ids=["bomb", "alias", "deep", "large", "pipe"],
)
def test_a_file_of_a_choice_that_has_no_end_is_refused(make, told: str) -> None:
    place = "env/deep/mine.yaml"
    path = Path("conf", place)
    path.parent.mkdir(parents=True)
    make(path)
    with pytest.raises(ConfigError, match=f"--config-dir conf: conf/{place}: .*{told}"):
        Composer("conf")
    Path("conf/elsewhere").mkdir()
    path.rename("conf/elsewhere/mine.yaml")  # not klrl's
    Composer("conf")
    # Unless a choice names it, or is a link to it.
    for entry in ("/elsewhere/mine", "/elsewhere/mine@kwargs", "linked/mine"):
        Path("conf/env").mkdir(exist_ok=True)
        Path("conf/env/other.yaml").write_text(f"defaults: [pendulum, {entry}]")
        if entry.startswith("linked"):
            Path("conf/env/linked").symlink_to("../elsewhere")
        with pytest.raises(ConfigError) as refused:
            Composer("conf").job_config(parse(["env=other"]))
        # Hydra finds no pipe.
        assert make is os.mkfifo or told in str(refused.value)


def chained(dollar: str) -> list[str]:
    """Each text is four times the one before."""
    chain = (f'  a{i}: "{f"{dollar}{{env.kwargs.a{i - 1}}}" * 4}"' for i in range(1, 18))
    return ["defaults: [pendulum]", "kwargs:", "  a0: xxxxxxxxxx", *chain]


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "files",
    [
        {"other": chained("$")},
        {"other": chained(r"\x24")},
        {f"m{i}": [f"defaults: [m{i + 1}@a, m{i + 1}@b]"] for i in range(25)}
        | {"m25": ["x: 1"], "other": ["defaults: [pendulum, m0]"]},
    ],
)
def test_files_that_copy_each_other_without_end_are_refused(files) -> None:
    Path("conf/env").mkdir(parents=True)
    for name, lines in files.items():
        Path(f"conf/env/{name}.yaml").write_text("\n".join(lines))
    with pytest.raises(ConfigError, match="have more than 16 interpolations and defaults"):
        Composer("conf").job_config(parse(["env=other"]))


def test_a_pipe_is_no_choice() -> None:
    Path("conf/env").mkdir(parents=True)
    os.mkfifo("conf/env/mine.yaml")
    assert described("env", "conf") == described("env")


@pytest.mark.integration
def test_a_signal_ends_a_process_that_composes() -> None:
    """OmegaConf takes a minute for a list of this length, and loses most of the signals."""
    Path("conf/env").mkdir(parents=True)
    Path("conf/env/long.yaml").write_text(f"kwargs: {{a: [{', '.join(['1'] * 300_000)}]}}")
    process = child("--config-dir", "conf", "env=long")
    time.sleep(2.3)
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    told, _ = process.communicate(timeout=30)
    assert process.returncode == 143, told
    assert time.monotonic() - began < 10
    assert not told.strip()


@pytest.mark.parametrize("before", [0, 1])
def test_a_signal_that_a_library_replaces_by_an_error_is_raised(before: int, monkeypatch) -> None:
    """``before``: calls that fail without a signal; klrl composes again after the first."""
    calls = []

    def loses(*_: object, **__: object) -> None:
        calls.append(1)
        try:
            if len(calls) > before:
                raise Interrupted(signal.SIGTERM)
        finally:
            raise ConfigAttributeError("half made")

    monkeypatch.setattr("hydra.compose", loses)
    with pytest.raises(Interrupted):
        Composer().composed(parse([f"+env.kwargs.g={12345 + before}"]))
    assert len(calls) == before + 1
