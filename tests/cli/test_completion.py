"""``klrl completion``: bash completes words with the script that klrl prints."""

import shutil
import subprocess

import pytest

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


def test_zsh_and_fish_get_the_same_words(capsys) -> None:
    scripts = []
    for shell in ("bash", "zsh", "fish"):
        assert exits("completion", shell) == 0
        scripts.append(capsys.readouterr().out)
    bash, zsh, fish = scripts
    assert zsh.endswith(bash)
    assert "bashcompinit" in zsh
    assert fish == f"complete -c klrl -a '{bash.split('compgen -W')[1].split(chr(34))[1]}'\n"
