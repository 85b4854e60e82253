"""Machines that this one is not: macOS, which has no /proc, Windows, Pythons that do not run."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("words", [["-m", "klrl", "--version"], ["-m", "klrl", "evaluate", "run"]])
def test_on_windows_one_line_names_wsl(words: list[str]) -> None:
    """As there: Python has no module fcntl."""
    Path("sitecustomize.py").write_text("import sys\nsys.modules['fcntl'] = None\n")
    env = os.environ | {"PYTHONPATH": f"{Path.cwd()}{os.pathsep}{ROOT}"}
    done = subprocess.run([sys.executable, *words], env=env, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "klrl: runs on Linux and macOS; on Windows, install it in WSL"
    ]


def test_a_python_that_klrl_is_not_installed_for_is_named_in_a_line() -> None:
    """As where a checkout is started by the machine's own Python."""
    Path("sitecustomize.py").write_text("import sys\nsys.modules['hydra'] = None\n")
    env = os.environ | {"PYTHONPATH": f"{Path.cwd()}{os.pathsep}{ROOT}"}
    words = [sys.executable, "-m", "klrl", "env=pendulum"]
    done = subprocess.run(words, env=env, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.replace("hydra.core", "hydra") == (
        f"klrl: {sys.executable} has no module hydra; start klrl with the Python of its "
        "environment, as .venv/bin/python -m klrl\n"
    )


#: Python as ``.ci/setup`` calls it: -c CODE, -m venv --clear FOLDER, -m pip; uv likewise.
STUB = """#!/bin/sh
echo "${0##*/} $*" >> log
case "$1 $2" in
  "-m venv") rm -rf "$4" && mkdir -p "$4/bin" && cp "$0" "$4/bin/python" ;;
  "-c import platform"*) echo "3.12.1 $0" ;;
  "-c import sys; sys.exit"*) exit ${OLD:-0} ;;
  "$FAILS") echo Retrying >&2; exit 1 ;;
  "$WAITS") kill -INT 0; exit 1 ;;
esac
exit %d
"""


def set_up(
    *programs: str, broken: str = "", folder: str = ".venv-own", **environment: str
) -> subprocess.CompletedProcess:
    """``.ci/setup FOLDER`` where only these programs are found; a broken one is there and fails."""
    bin_ = Path("bin")
    shutil.rmtree(bin_, ignore_errors=True)
    bin_.mkdir()
    for name in ("bash", "sh", "rm", "mkdir", "cp", "ls", "basename"):
        (bin_ / name).symlink_to(shutil.which(name))
    for name in (*programs, *broken.split()):
        (bin_ / name).write_text(STUB % (127 if name in broken else 0))
        (bin_ / name).chmod(0o755)
    Path("log").write_text("")
    return subprocess.run(
        [shutil.which("bash"), ROOT / ".ci/setup", folder, "-e", "."],
        env={"PATH": str(bin_.resolve()), "FAILS": "-", "WAITS": "-", **environment},
        capture_output=True,
        text=True,
        start_new_session=True,
    )


def log() -> list[str]:
    """The calls that made or filled an environment."""
    return [
        line
        for line in Path("log").read_text().splitlines()
        if " -c " not in line[:14] and "--version" not in line
    ]


INSTALLS = ".venv-own: installing -e . takes some minutes where it is new"


def test_the_newest_python_that_runs_is_taken_and_said() -> None:
    done = set_up("python3.12", "python3.11", "python3", broken="python3.14 python3.13")
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines() == [
        f".venv-own: Python 3.12.1, {Path('bin/python3.12').resolve()}",
        INSTALLS,
    ]
    assert log()[0] == "python3.12 -m venv --clear .venv-own"
    assert log()[1].startswith("python -m pip install ")
    assert log()[1].endswith(" -c constraints.txt -e .")

    again = set_up("python3.14", "python3.12")
    assert (again.returncode, again.stderr) == (0, f"{INSTALLS}\n"), "what is there is kept"
    assert len(log()) == 1

    Path(".venv-own/bin/python").unlink()
    Path(".venv-own/bin/python").symlink_to("gone")
    assert set_up("python3.14", "python3.12").returncode == 0
    assert log()[0] == "python3.14 -m venv --clear .venv-own", "its Python was removed"


@pytest.mark.parametrize(
    "folder", [".", "mine", "linked", ".venv-ln", "other/.venv", "./other/.venv"]
)
@pytest.mark.parametrize("program", ["python3.12", "uv"])
def test_nothing_is_emptied_that_make_did_not_name(program: str, folder: str) -> None:
    """``--clear`` empties a folder: a checkout (VENV=.), one of the user's, of another project."""
    for kept in ("mine/photos/a", "mine/bin/x", "other/.venv/notes"):
        Path(kept).parent.mkdir(parents=True, exist_ok=True)
        Path(kept).write_text("kept")
    for link in ("linked", ".venv-ln"):
        Path(link).symlink_to(Path("mine").resolve())
    done = set_up(program, folder=folder)
    assert done.returncode == 2
    assert done.stderr == f"VENV={folder}: is not empty and no environment; name another folder\n"
    assert not [line for line in log() if " venv " in line]
    assert Path("mine/photos/a").read_text() == Path("other/.venv/notes").read_text() == "kept"


def test_an_environment_without_pip_gets_it() -> None:
    """Ctrl-C while it is made leaves one; it may be the user's, and is not made anew."""
    assert set_up("python3.12").returncode == 0
    python = Path(".venv-own/bin/python")
    fails = 'case "$*" in "-m pip --version") exit 1 ;; esac\n'
    python.write_text(python.read_text().replace("exit 0", fails + "exit 0"))
    assert set_up("python3.12").returncode == 0
    assert [line.split(" -c constraints")[0] for line in log()][:1] == [
        "python -m ensurepip --upgrade"
    ]


def test_an_environment_of_another_python_is_named_and_kept() -> None:
    assert set_up("python3.12").returncode == 0
    done = set_up("python3.12", OLD="1")
    assert (done.returncode, log()) == (2, [])
    assert done.stderr == (
        "VENV=.venv-own: its Python is 3.12.1, and klrl needs 3.11 to 3.14; remove it, or name "
        "another folder\n"
    )


@pytest.mark.parametrize("name", ["mine", "my python"])
def test_the_python_that_is_named_is_taken(name: str) -> None:
    assert set_up("python3.14", name, PYTHON=name).returncode == 0
    assert log()[0] == f"{name} -m venv --clear .venv-own"


@pytest.mark.parametrize("python", ["", "mine"])
def test_with_no_python_it_is_said_what_to_install(python: str) -> None:
    named = {"PYTHON": python} if python else {}
    done = set_up(*(["python3.14"] if python else []), broken="mine python3", **named)
    assert done.returncode == 2
    none = "mine does not run, or is of another version" if python else "none is on PATH"
    assert f"klrl needs Python 3.11 to 3.14 with its module venv: {none}." in done.stderr
    assert all(each in done.stderr for each in ("apt install", "brew install", "or uv"))
    assert not Path(".venv-own").exists()


@pytest.mark.parametrize(("pythons", "taken"), [(["python3.12"], "python3.12"), ([], "3.13")])
def test_uv_is_used_where_it_is_installed(pythons: list[str], taken: str) -> None:
    assert set_up("uv", *pythons).returncode == 0
    venv, pip = log()
    assert venv.startswith("uv venv ")
    assert venv.endswith(f"--python {taken} .venv-own")
    assert pip.startswith("uv pip install ")
    assert pip.endswith("--python .venv-own/bin/python -c constraints.txt -e .")


@pytest.mark.parametrize(
    ("program", "fails", "what"),
    [
        ("python3.12", "-m pip", "pip install -e ."),
        ("uv", "pip install", "uv pip install -e ."),
        ("uv", "venv --quiet", "uv venv"),
    ],
)
def test_what_fails_is_said_below_the_words_of_pip(program: str, fails: str, what: str) -> None:
    """Without network they are a page of retries, which does not name it."""
    done = set_up(program, *(["python3.12"] if program == "uv" else []), FAILS=fails)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-2:] == [
        "Retrying",
        f".venv-own: {what} failed, see above; where no index was reached, see to the network, "
        "the proxy (HTTPS_PROXY) or pip's index, and run the same command again",
    ]


def test_ctrl_c_during_a_set_up_is_a_line() -> None:
    done = set_up("python3.12", WAITS="-m pip")
    assert done.returncode == 130
    assert done.stderr.splitlines()[-1] == (
        ".venv-own: stopped; the same command goes on with what is there"
    )


def made(*words: str, always: bool = True) -> str:
    """What make would do; the make that runs these tests hands nothing on."""
    env = {"PATH": os.environ["PATH"]}
    command = ["make", "--dry-run", *["--always-make"] * always, "-C", str(ROOT), *words]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout


@pytest.mark.integration
def test_without_a_network_what_is_installed_is_enough() -> None:
    """Pip would fetch the backend of the build, whenever pyproject.toml is the newer file."""
    python = Path(".venv-own/bin/python")
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    setup = [shutil.which("bash"), ROOT / ".ci/setup", Path.cwd() / ".venv-own"]
    offline = {**os.environ, "PIP_NO_INDEX": "1", "PATH": "/usr/bin:/bin"}
    for extra, code in (("language", 0), ("nonsense", 2)):
        words = ["--dry-run", "-e", f".[{extra}]"]
        done = subprocess.run(
            [*setup, *words], cwd=ROOT, env=offline, capture_output=True, text=True
        )
        assert done.returncode == code, done.stderr
        assert ("is there; goes on" in done.stderr) == (code == 0)


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_a_python_that_is_named_has_an_environment_of_its_own() -> None:
    own = ".venv-{}.{}".format(*sys.version_info)
    assert f"bash .ci/setup {own} -e '.[dev]'" in made("quick", f"PYTHON={sys.executable}")
    assert "bash .ci/setup .venv -e '.[dev]'" in made("quick")
    told = made("run", "ARGS=env=hopper")
    assert "bash .ci/setup .venv -e .\n" in told, "no extra: a job that needs one names it"
    assert "\n.venv/bin/python -m klrl env=hopper\n" in told


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
@pytest.mark.parametrize("folder", ["a folder", ""])
def test_a_folder_that_make_cannot_take_is_named(folder: str) -> None:
    command = ["make", "--dry-run", "-C", ROOT, "run", f"VENV={folder}", "--no-print-directory"]
    done = subprocess.run(command, env={"PATH": os.environ["PATH"]}, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stdout == ""
    assert f"*** VENV={folder}: make takes one folder without spaces; name another." in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_an_environment_whose_python_is_gone_is_set_up_again(tmp_path) -> None:
    for name in ("bin/python", ".dev"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    (tmp_path / "bin/python").chmod(0o755)
    os.utime(tmp_path / ".dev", (2**32, 2**32))
    words = ("lint", f"VENV={tmp_path}")
    assert ".ci/setup" not in made(*words, always=False)
    (tmp_path / "bin/python").unlink()
    (tmp_path / "bin/python").symlink_to("gone")
    assert f"bash .ci/setup {tmp_path} -e '.[dev]'" in made(*words, always=False)


def test_every_job_of_the_workflows_is_one_script_that_anyone_can_run() -> None:
    targets = re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    called = set()
    for workflow in (ROOT / ".github/workflows").glob("*.yml"):
        assert "://" not in workflow.read_text(), "no index is named in a file"
        for job in yaml.safe_load(workflow.read_text())["jobs"].values():
            (line,) = [step["run"] for step in job["steps"] if "run" in step]
            bash, script, *_ = line.split()
            assert (bash, script.partition("/")[0]) == ("bash", ".ci")
            called.add(script)
    assert called == {".ci/run", ".ci/two-commands", ".ci/nightly", ".ci/docs"}
    for script in called:
        subprocess.run([shutil.which("bash"), "-n", ROOT / script], check=True)
        words = re.findall(r"^make (.+)$", (ROOT / script).read_text(), re.MULTILINE)
        assert set(words) <= set(targets)


def test_the_workflow_takes_the_pythons_that_klrl_takes() -> None:
    jobs = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]
    setup = (ROOT / ".ci/setup").read_text()
    first, end = (int(n) for n in re.search(r"\(3, (\d+)\) <= .* < \(3, (\d+)\)", setup).groups())
    pythons = [f"3.{minor}" for minor in range(first, end)]
    assert jobs["two-commands"]["strategy"]["matrix"]["python"] == pythons
    assert jobs["all"]["strategy"]["matrix"]["python"] == ["3.11", "3.13"]
    # Two environments with CUDA may not fit a runner's disk.
    assert "CPU" in jobs["all"]["env"]["PIP_EXTRA_INDEX_URL"]
    assert "://" not in (ROOT / "constraints.txt").read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == f">=3.{first}"
    python = "Programming Language :: Python :: 3."
    listed = [each for each in project["classifiers"] if each.startswith(python)]
    assert listed == [python + each.removeprefix("3.") for each in pythons]
