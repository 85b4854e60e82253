"""``--cfg job``: Hydra's own values, each with the comment of its declaration."""

import re
from pathlib import Path

import hydra
import pytest
import yaml
from omegaconf import OmegaConf

from benchmarks.pages.mujoco import NAMES
from klrl.config import ALL_CHOICES, Ungrouped, conf_dir
from klrl.config.explain import described
from klrl.config.nodes import notes_of
from tests.config.test_yaml import ASKING
from tests.runs.commands import exits

#: A group within a group, and what klrl finds out.
UNCOMMENTED = ("lora", "sources")
#: Whose files look like half_cheetah's or cartpole's.
ALIKE = {f"env={name}" for name in NAMES if name != "half_cheetah"} | {
    *("env=acrobot", "env=bipedal_walker", "env=lunar_lander", "env=minigrid"),
}
WORDS = [
    *(
        pytest.param([word], marks=pytest.mark.slow) if word in ALIKE else [word]
        for group in ("env", "experiment")
        for word in (f"{group}={name}" for name in described(group))
        if word not in ("env=custom", "env=pendulum_batch")  # tests/config/test_own.py
    ),
    ["kl=legacy", "controller=adaptive", "reference=ema", "loss=klpen_held", "optim=adamw"],
    ["env.kwargs={g: 5.0}", "logger.tags=[a,'b # c']", "actor=tanh_normal", "collector=torchrl"],
]


def printed(capsys, *words: str, code: int = 0) -> str:
    left = exits(*words)
    told = capsys.readouterr()
    assert left == code, told.err
    return told.out if code == 0 else told.err


def of_hydra(*words: str) -> str:
    """The settings that Hydra itself composes."""
    with hydra.initialize_config_dir(str(conf_dir().resolve()), version_base="1.3"):
        return OmegaConf.to_yaml(hydra.compose("config", overrides=list(words)))


@pytest.mark.integration
@pytest.mark.parametrize("words", WORDS, ids=" ".join)
def test_values_are_hydras_and_every_setting_has_its_comment(capsys, monkeypatch, words) -> None:
    chosen = [tuple(word.split("=", 1)) for word in words]
    words = [*words, *(more for choice in chosen for more in ASKING.get(choice, []))]
    text = printed(capsys, *words, "--cfg", "job")
    plain = [f"++{w}" if w.startswith("env.kwargs") else w for w in words]
    theirs = of_hydra(*plain)
    assert yaml.safe_load(text) == yaml.safe_load(theirs)
    assert re.sub(r"  # .*", "", text) == re.sub(r"  # .*", "", theirs)
    # The arguments of environments and wrappers are others', and have no comments.
    others = r"^  (?:wrappers|kwargs):.*\n(?:  - .*\n|    .*\n)+"
    text = re.sub(others, "", text, flags=re.MULTILINE)
    settings = [line for line in text.splitlines() if re.match(r" *\w+:", line)]
    for line in settings:
        key, comment = re.match(r" *(\w+):.*?(?:  # (.*))?$", line).groups()
        if key in UNCOMMENTED or (not line.startswith(" ") and line.endswith(":")):
            assert comment is None, line
        else:
            assert comment in COMMENTS[key], line


def _comments() -> dict[str, set[str]]:
    """Last part of a key -> its comments in the schemas."""
    found: dict[str, set[str]] = {"name": {"set by the choice"}}
    schemas = [choice.schema for known in ALL_CHOICES.values() for choice in known.values()]
    for schema in (Ungrouped, *schemas):
        for key, note in notes_of(schema).items():
            found.setdefault(key.rpartition(".")[2], set()).add(note)
    return found


COMMENTS = _comments()


def line_of(text: str, key: str) -> str:
    return next(line.strip() for line in text.splitlines() if line.strip().startswith(f"{key}:"))


def test_the_comment_is_that_of_the_chosen_schema(capsys) -> None:
    text = printed(capsys, "env=half_cheetah", "--cfg", "job")
    assert line_of(text, "id").startswith("id: HalfCheetah-v5  # a Gymnasium id, or")
    assert line_of(text, "init_std").startswith("init_std: 0.5  # standard deviation at the start")
    assert line_of(text, "steps").startswith("steps: 10000  # most steps of one evaluation")
    assert line_of(text, "epochs") == "epochs: 10  # passes over the rollout"


def test_a_text_over_several_lines_has_no_comment(capsys) -> None:
    words = ("logger.project='" + "long " * 30 + "'", "logger.entity=me")
    text = printed(capsys, *words, "--cfg", "job")
    assert yaml.safe_load(text)["logger"]["project"] == "long " * 30
    assert line_of(text, "entity") == "entity: me  # wandb team or user"


@pytest.mark.integration
@pytest.mark.parametrize("words", [["experiment=text"], ["env=gym"]], ids=" ".join)
def test_a_job_that_lacks_values_is_shown_with_them_open(capsys, words) -> None:
    text = printed(capsys, *words, "--cfg", "job")
    assert yaml.safe_load(text) == yaml.safe_load(of_hydra(*words))
    key = "data" if "experiment=text" in words else "id"
    assert re.search(rf"\n  {key}: \?\?\?  # ", text)
    assert "did you mean kl.coef?" in printed(capsys, *words, "kl.coff=1", "--cfg", "job", code=2)


def test_the_users_own_choice_is_shown(capsys) -> None:
    Path("mine/env").mkdir(parents=True)
    Path("mine/env/mine.yaml").write_text(
        "# @package _global_\ndefaults:\n  - gym@env\n  - _self_\n"
        "env: {id: Pendulum-v1}\nkl:\n  coef: 3\nseed: ${eval.episodes}\n"
    )
    words = ("--config-dir", "mine", "env=mine", "--cfg", "job")
    text = printed(capsys, *words)
    assert line_of(text, "coef").startswith("coef: 3  # penalty per nat")
    assert line_of(text, "seed").startswith("seed: ${eval.episodes}  # seeds parameters")


def test_flags_stand_anywhere(capsys) -> None:
    """Python's argparse refuses words after a flag's value, unless it is asked not to."""
    assert printed(capsys, "env=pendulum", "--cfg", "job", "seed=4") == printed(
        capsys, "--cfg", "job", "env=pendulum", "seed=4"
    )
