"""``klrl completion``: what a word can go on with, asked here and through real shells."""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from klrl.cli.completion import candidates, completion_command
from klrl.cli.main import COMMANDS
from klrl.config import ALL_CHOICES, conf_dir

ESTIMATORS = ["custom", "exact", "k1", "k2", "k3"]


def named(group: str) -> list[str]:
    """The YAMLs and the registered choices of a group."""
    stems = {path.stem for path in (conf_dir() / group).glob("*.yaml")}
    return sorted(stems | ALL_CHOICES.get(group, {}).keys())


QUERIES = {
    "kl.co": ["kl.coef="],
    "kl.estimator=": [f"kl.estimator={name}" for name in ESTIMATORS],
    "env=": [f"env={name}" for name in named("env")],
    "run env=half": ["env=half_cheetah"],
    "kl.allow_biased=": ["kl.allow_biased=false", "kl.allow_biased=true"],
    "lo": ["logger.", "logger=", "loss.", "loss="],
    "fr": ["frames="],
    # Set by the choice, never by hand.
    "kl.m": [],
    "-m search.n": [],
    "env.kw": ["env.kwargs."],
    "++kl.co": ["++kl.coef="],
    "actor=causal_lm actor.lora.": [
        f"actor.lora.{name}=" for name in ("alpha", "dropout", "r", "target_modules")
    ],
    # Of the chosen loss alone; where it has none, those of the others.
    "loss=clip loss.clip": ["loss.clip_epsilon=", "loss.clip_epsilon_high=", "loss.clip_value="],
    "loss.clip": ["loss.clip_value="],
    "loss=clip loss.beta_r": ["loss.beta_rule="],
    # A sweep has words of its own, and lists of values.
    "launcher=": [f"launcher={name}" for name in named("launcher")],
    "laun": [],
    "-m laun": ["launcher.", "launcher="],
    "plan -m sea": ["search.", "search="],
    "--mu": ["--multirun"],
    "evaluate a --ch": ["--checkpoint"],
    "evaluate a --checkpoint ": ["best", "last"],
    "evaluate a --episodes ": [],
    "evaluate a env.kw": ["env.kwargs."],
    "export a --": ["--help", "--merge", "--model", "--which"],
    "report --un": ["--unfinished"],
    "doctor ": [],
    "doctor --placement ": ["loss", "reward", "split"],
    "doctor --divergence ": ["forward", "js", "none", "reverse", "tv"],
    "completion ": ["bash", "zsh"],
    "completion bash ": [],
    "nothing.such=": [],
}


@pytest.mark.parametrize("line", QUERIES)
def test_a_word_goes_on_with(line: str) -> None:
    words = line.split(" ")
    assert candidates(words) == QUERIES[line]


def test_the_first_word_is_a_command_or_a_word_of_run() -> None:
    found = candidates([""])
    assert set(COMMANDS) < set(found)
    assert {"kl=", "kl.", "frames=", "env="} < set(found)
    assert not set(COMMANDS) & set(candidates(["seed=1", ""]))


def test_every_setting_of_a_job_is_completed() -> None:
    """Against what Hydra composes, not against the schemas."""
    from omegaconf import OmegaConf

    from klrl.config.compose import compose
    from klrl.runs.folder import by_dotted_key

    for words in (["env=gym"], ["experiment=text"], ["reference=ema", "controller=dual"]):
        composed = by_dotted_key(OmegaConf.to_container(compose(words)))
        for key in composed:
            if key.split(".")[-1] in ("name", "kind", "mode", "task", "distribution", "sources"):
                continue
            expected = "env.kwargs." if key == "env.kwargs" else f"{key}="
            assert expected in candidates([*words, key]), key


def test_the_users_own_choices() -> None:
    Path("mine/env").mkdir(parents=True)
    text = "# @package _global_\ndefaults:\n  - gym@env\n  - _self_\nenv: {id: Mine-v0}\n"
    Path("mine/env/mine.yaml").write_text(text)
    assert candidates(["--config-dir", "mine", "env=m"]) == ["env=mine", "env=minigrid"]
    assert candidates(["--config-dir", "mine", "env=mine", "env.num"]) == ["env.num_envs="]


#: The command, which need not be installed where the tests run.
KLRL = f'klrl() {{ {shlex.quote(sys.executable)} -m klrl "$@"; }}\n'


def in_shell(shell: str, script: str) -> str:
    root = str(Path(__file__).parents[2])
    before = [path for path in [os.environ.get("PYTHONPATH")] if path]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([root, *before])}
    flags = ["--norc"] if shell == "bash" else ["-f"]
    done = subprocess.run(
        [shell, *flags, "-c", KLRL + script], capture_output=True, text=True, env=environment
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


#: What bash makes of a line: it cuts at = and :, and replaces the last part alone.
CUT = [
    (["klrl", "kl.co"], ["kl.coef="]),
    (["klrl", "kl", "="], ["legacy", "none", "retrieve"]),
    (["klrl", "kl", "=", "le"], ["legacy"]),
    (["klrl", "seed", "=", "1", "kl.estimator", "="], ESTIMATORS),
    (["klrl", "evaluate", "outputs/o"], []),  # the shell's own: files and folders
    (["klrl", "resume", "=", "outputs/"], []),
    (
        ["klrl", "loss", "=", "clip", "loss.clip"],
        ["loss.clip_epsilon=", "loss.clip_epsilon_high=", "loss.clip_value="],
    ),
    (["klrl", "doctor", ""], []),
]


@pytest.mark.integration
def test_bash_completes() -> None:
    script = "source <(klrl completion bash)\n"
    for words, _ in CUT:
        quoted = " ".join(shlex.quote(word) for word in words)
        script += f"COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; _klrl klrl\n"
        script += 'echo "${COMPREPLY[@]}"\n'
    told = in_shell("bash", script + "complete -p klrl\n").splitlines()
    assert told[-1] == "complete -o default -F _klrl klrl"
    for line, (words, expected) in zip(told, CUT, strict=False):
        assert line.split() == expected, words


@pytest.mark.skipif(shutil.which("zsh") is None, reason="needs zsh")
@pytest.mark.integration
def test_zsh_completes() -> None:
    script = (
        "autoload -Uz compinit; compinit -u -D\n"
        'eval "$(klrl completion zsh)"\n'
        'compadd() { print -r -- "${(P@)@[-1]}"; }\n'
        "words=(klrl kl.estimator=); CURRENT=2; PREFIX=kl.estimator=; _klrl\n"
        "words=(klrl evaluate a --ch); CURRENT=4; PREFIX=--ch; _klrl\n"
        "print -r -- $_comps[klrl]\n"
    )
    told = in_shell("zsh", script).split()
    assert told == [*(f"kl.estimator={name}" for name in ESTIMATORS), "--checkpoint", "_klrl"]


def test_the_scripts_are_in_the_package(capsys) -> None:
    for shell in ("bash", "zsh"):
        assert completion_command([shell]) == 0
        assert f'eval "$(klrl completion {shell})"' in capsys.readouterr().out
    assert completion_command(["--help"]) == 0
    assert "~/.bashrc" in capsys.readouterr().out
