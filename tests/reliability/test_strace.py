"""What klrl starts and where it connects in a stranger's folder, as the kernel sees it (strace)."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import wandb
from tensordict import TensorDict

from klrl.runs.machine import cxx
from tests.conftest import QUICK
from tests.runs.test_run import repository_with
from tests.runs.wandb_server import KEY, serving

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not shutil.which("strace"), reason="needs strace (apt-get install strace)"),
]
#: Names of programs and modules that klrl, its libraries and their child processes look for.
NAMES = ("git", "g++", "c++", "gcc", "cc", "cc1plus", "collect2", "ld", "as", "uname", "openssl",
         "ps", "python", "python3", "sh", "which", "ldconfig", "nvidia-smi", "lscpu",
         "wandb-core")  # fmt: skip
MODULES = ("ctypes", "textwrap", "multiprocessing", "sitecustomize", "usercustomize", "glfw")
STARTED = re.compile(r'execve\("([^"]*)".* = 0$', re.MULTILINE)
CONNECTED = re.compile(r"connect\(\d+, (\{.*\})", re.MULTILINE)
#: Unix sockets and loopback.
NEAR = re.compile(r'AF_UNIX|AF_NETLINK|inet_addr\("127\.|inet_pton\(AF_INET6, "(::1|::ffff:127\.)')


def hostile(folder: Path) -> None:
    """Programs and modules by the names that are called, and a partial clone with commands."""
    for name in NAMES:
        (folder / name).write_text(f"#!/bin/sh\ntouch {folder}/ran\n")
        (folder / name).chmod(0o700)
    for name in MODULES:
        (folder / f"{name}.py").write_text(f"open({str(folder / 'ran')!r}, 'w')\n")
    repository_with("core.fsmonitor")
    words = {"core.repositoryformatversion": "1", "extensions.partialClone": "origin"}
    words |= {"remote.origin.promisor": "true", "remote.origin.url": "file:///tmp"}
    words |= {"remote.origin.uploadpack": f"{folder}/hook.sh", "core.sshCommand": "./hook.sh"}
    for name, value in words.items():
        subprocess.run(["git", "config", name, value], check=True)
    told = ["git", "rev-parse", "HEAD^{tree}"]
    tree = subprocess.run(told, capture_output=True, text=True, check=True).stdout.strip()
    (folder / ".git/objects" / tree[:2] / tree[2:]).unlink()
    frames = {"observation": torch.randn(40, 3), "action": torch.randn(40, 1)}
    frames["next"] = TensorDict({"reward": torch.zeros(40, 1)}, [40])
    TensorDict(frames, [40]).memmap(str(folder / "data"))


def traced(words: tuple[str, ...], **environment: str) -> tuple[set[str], set[str]]:
    """The programs that a command starts, and the addresses to which it connects."""
    log = Path("../strace.txt")
    command = [sys.executable, "-P", "-m", "klrl", *words]
    strace = [shutil.which("strace"), "-f", "-qq", "-s", "300", "-e", "signal=none"]
    strace += ["-e", "trace=execve,execveat,connect", "-o", str(log)]
    root = str(Path(__file__).parents[2])
    env = {key: value for key, value in os.environ.items() if not key.startswith("WANDB_")}
    env |= {
        "PATH": f".:{os.environ['PATH']}",
        "PYTHONPATH": root,
        "HOME": str(Path("..").resolve()),
    }
    done = subprocess.run(
        [*strace, *command], env=env | environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    text = log.read_text()
    return set(STARTED.findall(text)), set(CONNECTED.findall(text))


@pytest.fixture
def allowed(tmp_path, monkeypatch) -> set[str]:
    """The programs that a run may start; the current folder is a hostile one."""
    folder = tmp_path / "hostile"
    folder.mkdir()
    monkeypatch.chdir(folder)
    hostile(folder)
    # Python's platform module calls uname, and matplotlib fc-list for its first list of fonts.
    found = {sys.executable, *(str(shutil.which(name)) for name in ("git", "uname", "fc-list"))}
    own = subprocess.run(["git", "--exec-path"], capture_output=True, text=True, check=True)
    return found | {f"{own.stdout.strip()}/git"}  # git calls itself, and refuses to fetch


def test_nothing_of_the_folder_is_started_and_nobody_else_is_called(allowed: set[str]) -> None:
    core = Path(wandb.__file__).parent / "bin"
    allowed |= {str(core / "wandb-core"), str(core / "wandb-symon")}
    small = (*QUICK[:-1], "logger=wandb")
    off = {"WANDB_MODE": "offline"}
    clone = (*(w for w in small if not w.startswith("collector")), "collector.steps=4")
    with serving() as server:
        told = {"WANDB_API_KEY": KEY, "WANDB_BASE_URL": server.url}
        for words, more in (
            ((*small, "hydra.run.dir=run"), {}),
            (("resume=run", "frames=192"), {}),
            (("resume=run", "frames=256"), off),
            (("evaluate", "run", "--episodes", "2"), {}),
            ((*QUICK, "hydra.run.dir=quiet"), {}),
            (
                (
                    "experiment=clone",
                    "data=data",
                    *clone,
                    "loss.critic_coeff=0",
                    "collector.held_out=0",
                ),
                {},
            ),
        ):
            programs, addresses = traced(words, **told, **more)
            print(f"klrl {' '.join(words)}: starts {programs}, connects to {addresses}")
            assert programs <= allowed, words
            assert not {each for each in addresses if not NEAR.search(each)}, words
            assert not Path("ran").exists(), words
        assert all("Basic" in str(key) for key in server.keys - {None})
        assert len(server.runs) == 2


def of_the_compiler() -> tuple[set[str], set[str]]:
    """The C++ compilers of this machine, and what they and torch's compiler start."""
    names = [os.environ.get("CXX", "g++"), "c++", "clang++"]
    compilers = {path for path in map(shutil.which, names) if path}
    parts = {str(shutil.which("openssl"))}  # torch hashes a package's weights by it
    for compiler in compilers:
        for part in ("cc1", "cc1plus", "as", "collect2", "ld"):
            asked = [compiler, f"-print-prog-name={part}"]
            told = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
            parts.add(str(shutil.which(told)))
    return compilers, parts


@pytest.mark.skipif(cxx() is None, reason="needs a C++ compiler")
def test_a_compiled_run_starts_the_compiler_by_its_path_alone(allowed: set[str]) -> None:
    words = (*(w for w in QUICK if not w.startswith("learner.compile")), "learner.compile=aot")
    programs, addresses = traced(
        (*words, "hydra.run.dir=run"), XDG_CACHE_HOME=str(Path("../cache"))
    )
    print(f"learner.compile=aot: starts {sorted(programs)}, connects to {addresses}")
    compilers, parts = of_the_compiler()
    assert programs & compilers, "it compiles"
    assert programs <= allowed | compilers | parts
    assert not {each for each in addresses if not NEAR.search(each)}
    assert not Path("ran").exists()
