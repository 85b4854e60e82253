"""``klrl completion``: bash, zsh and fish complete words with the scripts that klrl prints."""

import os
import pty
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.base.test_screen import read
from tests.runs.commands import exits

#: Calls the function as bash does: words end at spaces and at =. A + follows if a space would.
TRY = """
COMP_WORDBREAKS=$' \\t\\n"\\'><=;|&(:'
COMP_LINE="$LINE"; COMP_POINT=${#COMP_LINE}
compopt() { space=+; }
_klrl
printf '%s\\n' "${COMPREPLY[@]}" $space
"""


@pytest.mark.parametrize(
    ("line", "replies"),
    [
        ("klrl env=pen", ["pendulum", "pendulum_batch"]),
        ("klrl fig", ["figure", "+"]),
        ("klrl env=hopper kl=r", ["retrieve", "+"]),
        ("klrl env=hopper kl.coe", ["kl.coef="]),
        ("klrl -m sw", ["sweep="]),
        ("klrl env=hopper hydra", ["hydra.run.dir="]),
        ("klrl evaluate outputs/x env.num_e", ["env.num_envs="]),
    ],
)
def test_bash_completes(capsys, line: str, replies: list[str]) -> None:
    bash = shutil.which("bash")
    assert bash is not None
    assert exits("completion", "bash") == 0
    script = capsys.readouterr().out
    assert "\n" not in script.split("compgen -W")[1].split('"')[1]
    done = subprocess.run(
        [bash, "-c", script + TRY], env={"LINE": line}, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == replies


def script_of(capsys, shell: str) -> str:
    """The path of a shell's program; its script is in ./script."""
    program = shutil.which(shell)
    if program is None:
        pytest.skip(f"needs {shell}")
    assert exits("completion", shell) == 0
    Path("script").write_text(capsys.readouterr().out)
    return program


@pytest.mark.integration
@pytest.mark.parametrize(
    ("typed", "run"),
    [
        ("klrl env=pendulum_b\t", "env=pendulum_batch"),
        ("klrl fig\t--out x", "figure --out x"),
        ("klrl env=hopper kl.coe\t0.1", "env=hopper kl.coef=0.1"),
        ("klrl evaluate outp\tRU\t", "evaluate outputs/RUN"),
        ("klrl resume=outp\tRU\t", "resume=outputs/RUN"),
    ],
)
def test_zsh_completes(capsys, typed: str, run: str) -> None:
    """Typed at a terminal's prompt; a function named klrl prints its words."""
    zsh = script_of(capsys, "zsh")
    Path("outputs/RUN").mkdir(parents=True)
    ours, theirs = pty.openpty()
    how: Any = dict.fromkeys(("stdin", "stdout", "stderr"), theirs)
    env = {"TERM": "xterm", "HOME": str(Path.cwd()), "PATH": os.environ["PATH"]}
    shell = subprocess.Popen([zsh, "-f", "-i"], env=env, start_new_session=True, **how)
    try:
        os.write(ours, b"source ./script; klrl() { print -r -- \"<$*>\" }; print REA''DY\n")
        assert b"READY" in read(ours, b"READY", 30.0)
        os.write(ours, f"{typed}\n".encode())
        assert f"<{run}>" in read(ours, b">\r\n", 30.0).decode()
    finally:
        shell.kill()
        shell.wait()
        os.close(theirs)
        os.close(ours)


@pytest.mark.parametrize(
    ("line", "replies"),
    [
        ("klrl env=pen", ["env=pendulum", "env=pendulum_batch"]),
        ("klrl -m env=hopper kl.coe", ["kl.coef="]),
        ("klrl evaluate outp", ["outputs/"]),
        ("klrl resume=outp", ["resume=outputs/"]),
    ],
)
def test_fish_completes(capsys, line: str, replies: list[str]) -> None:
    fish = script_of(capsys, "fish")
    Path("outputs").mkdir()
    words = f"source ./script; complete -C '{line}'"
    done = subprocess.run(
        [fish, "-c", words],
        env={"HOME": str(Path.cwd()), "PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        check=True,
    )
    assert (done.stdout.split(), done.stderr) == (replies, "")
