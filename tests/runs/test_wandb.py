"""``logger=wandb``: a run per job, in a group per sweep, without a key offline."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest

import klrl
from benchmarks.sort_digits_base import build
from klrl.base.errors import ConfigError, NonFiniteError
from klrl.config.identity import settings_hash
from klrl.runs.resume import stored_config
from klrl.runs.wandb_logger import wandb_mode, wandb_server
from klrl.train.loop import Training
from tests.conftest import QUICK
from tests.language.conftest import QUICK as LANGUAGE_QUICK
from tests.language.conftest import QUICK_MODEL
from tests.runs.commands import exits, manifest_of, only_run, rows_of, wandb_records
from tests.runs.wandb_server import KEY, Server, serving

pytestmark = [pytest.mark.services, pytest.mark.timeout(300)]


def test_a_sweep_gives_a_folder_and_a_wandb_run_per_job_in_one_group() -> None:
    code = exits("-m", *QUICK[:-1], "kl=legacy,retrieve", "seed=0,1")
    assert code == 0
    folder = only_run()
    jobs = sorted(p for p in folder.iterdir() if p.is_dir())
    assert [job.name for job in jobs] == [
        f"kl={kl},seed={seed}" for kl in ("legacy", "retrieve") for seed in (0, 1)
    ]
    assert len({manifest_of(job)["wandb_id"] for job in jobs}) == 4
    told = [wandb_records(job) for job in jobs]
    assert {t["run"][0]["run_group"] for t in told} == {folder.name}
    modes = [(stored_config(j).kl.name, stored_config(j).seed) for j in jobs]
    assert modes == [("legacy", 0), ("legacy", 1), ("retrieve", 0), ("retrieve", 1)]


def test_a_failed_run_is_marked_failed_in_wandb(settings) -> None:
    from klrl.runs.folder import RunFolder

    experiment = Training(settings("logger=wandb"))

    def fail(batch):
        raise NonFiniteError("reward of nothing")

    experiment.parts.charge_kl = fail
    with pytest.raises(NonFiniteError):
        experiment.train(RunFolder(Path("run")))
    assert wandb_records(Path("run"))["exit"][0]["exit_code"] == 1


@pytest.mark.parametrize("domain", ["control", "language"])
def test_a_run_has_what_a_researcher_looks_for(domain: str) -> None:
    words = [*QUICK[:-2], "eval.every=1"]
    if domain == "language":
        build(QUICK_MODEL, Path("model"))
        given = [each for each in LANGUAGE_QUICK if not each.startswith(("logger", "eval.every"))]
        words = [*given, "actor.model=model", "eval.every=1"]
    more = ("logger.artifacts=true", "logger.notes=first", "logger.tags=[mine]", "logger.group=two")
    assert exits(*words, *more, "hydra.run.dir=run") == 0
    told, manifest, rows = (
        wandb_records(Path("run")),
        manifest_of(Path("run")),
        rows_of(Path("run")),
    )
    first = told["run"][0]
    config, about = first["config"]["update"], first["config"]["update"]["klrl"]
    task = "pendulum" if domain == "control" else "sort_digits"
    assert first["display_name"].startswith(f"{task}-{config['loss']['name']}-kl")
    assert first["display_name"].endswith(f"-s{config['seed']}")
    assert {task, config["loss"]["name"], "retrieve", "mine"} <= {*first["tags"]}
    assert (first["run_group"], first["notes"]) == ("two", "first")
    assert (about["version"], about["argv"]) == (klrl.__version__, manifest["argv"])
    assert about["identity"] == settings_hash(stored_config(Path("run")))
    metrics = {each["name"]: each for each in told["metric"] if "name" in each}
    axis = "frames" if domain == "control" else "samples"
    assert metrics["eval/return"]["step_metric"] == axis
    hidden = {name for name, each in metrics.items() if each["options"].get("hidden")}
    assert {"iteration", "eval/return_se", "time/sampling"} <= hidden
    assert not {"eval/return", "kl/ref/exact", "learner/lr"} & hidden
    sections = {name.partition("/")[0] for name in rows[-1] if "/" in name}
    assert {"eval", "kl", "learner", "loss", "policy", "reward", "time"} == sections
    summary: dict = {}
    for each in told["summary"]:
        summary |= each["update"]
    assert summary["eval/return"] == rows[-1]["eval/return"]
    assert summary["best/eval/return"] == max(row["eval/return"] for row in rows)
    (artifact,) = [each for each in told["artifact"] if each["type"] == "model"]
    files = {each["path"]: Path(each["local_path"]) for each in artifact["manifest"]["contents"]}
    assert {"curves.png", "manifest.json", "metrics.jsonl", ".hydra/config.yaml"} <= files.keys()
    assert any(re.fullmatch(r"checkpoints/last/.*/state.safetensors", each) for each in files)
    assert {each.is_relative_to(Path("run").resolve()) for each in files.values()} == {True}


def default_host() -> str:
    import wandb

    return urlsplit(wandb.Settings().base_url).netloc


@pytest.mark.parametrize("place", ["wandb", "mine"])
def test_settings_that_are_a_pipe_are_refused(monkeypatch, place: str) -> None:
    monkeypatch.setenv("WANDB_CONFIG_DIR", "mine")
    Path(place).mkdir()
    os.mkfifo(f"{place}/settings")
    with pytest.raises(ConfigError, match=f"{place}/settings: cannot be read .*regular file"):
        wandb_server()


def test_wandb_is_offline_without_a_key(monkeypatch, tmp_path) -> None:
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    assert wandb_mode("auto") == "offline"
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    for host, mode in (("example.com", "offline"), (default_host(), "online")):
        Path("netrc").write_text(f"machine {host} login user password {KEY}\n")
        assert wandb_mode("auto") == mode
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    assert wandb_mode("auto") == "online"
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert wandb_mode("auto") == "disabled"
    assert wandb_mode("online") == "online"


def history(folder: Path) -> list[dict]:
    """The rows of a file of wandb's."""
    return [r["item"] for r in wandb_records(folder.parents[1], folder.name)["history"]]


#: Settings as a wandb sweep has them: a list, a bool and numbers are its own.
SWEPT = {
    **{key: value for key, _, value in (word.partition("=") for word in QUICK[:-1])},
    **{"kl.coef": 0.25, "actor.hidden": [8], "env.normalize_observation": True, "seed": 3},
}


@pytest.mark.parametrize("command", [None, ["${env}", "${program}", "${args}"]])
def test_an_agents_default_arguments_train_and_its_id_is_stored(command, monkeypatch) -> None:
    from wandb.wandb_agent import Agent

    bin_ = str(Path(sys.executable).parent)
    monkeypatch.setenv("PATH", f"{bin_}{os.pathsep}{os.environ['PATH']}")
    for name in ("WANDB_RUN_ID", "WANDB_SWEEP_PARAM_PATH", "WANDB_DIR"):
        monkeypatch.setenv(name, "")  # the agent sets them in this process
    monkeypatch.delenv("WANDB_DIR")
    monkeypatch.setenv("WANDB_SWEEP_ID", "sweep1")
    Path("train.py").write_text("from klrl.__main__ import main\nmain()\n")
    agent = Agent(api=None, queue=None, sweep_id="sweep1")
    agent._sweep_command = command
    args = {name: {"value": value} for name, value in {**SWEPT, "hydra.run.dir": "run"}.items()}
    program = "klrl" if command else "train.py"
    told = {"type": "run", "run_id": "agent01", "program": program, "args": args}
    assert "exception" not in agent._process_command(told)
    assert agent._run_processes["agent01"].wait(timeout=120) == 0
    manifest, rows = manifest_of(Path("run")), rows_of(Path("run"))
    assert manifest["wandb_id"] == "agent01"
    assert wandb_records(Path("run"))["run"][0]["run_id"] == "agent01"
    assert (manifest["seed"], len(rows), rows[0]["kl/ref/coef"]) == (3, 2, 0.25)
    for name in ("WANDB_RUN_ID", "WANDB_SWEEP_ID", "WANDB_SWEEP_PARAM_PATH"):
        monkeypatch.delenv(name)
    assert exits("resume=run", "frames=192") == 0  # without the agent, in the same wandb run
    assert manifest_of(Path("run"))["wandb_id"] == "agent01"
    first, second = sorted(Path("run/wandb").glob("offline-run-*-agent01"))
    frames = [[row["frames"] for row in history(each)] for each in (first, second)]
    assert frames == [[64, 128], [64, 128, 192]]
    assert [row["_step"] for row in history(second)] == [0, 1, 2]


#: klrl with a short limit for the last uploads.
SHORT = """
import sys
from klrl.__main__ import main
from klrl.runs import wandb_logger
wandb_logger._FINISH_SECONDS = 4.0
main(sys.argv[1:])
"""


def online(server: Server, *words: str) -> subprocess.CompletedProcess:
    """klrl in a process, with wandb on the server; its output and errors in one pipe."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("WANDB_")}
    env |= {"WANDB_BASE_URL": server.url, "WANDB_API_KEY": KEY, "WANDB_CONFIG_DIR": "none"}
    command = [sys.executable, "-c", SHORT, *words]
    told = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "timeout": 200}
    return subprocess.run(command, env=env, **told)


def test_a_resumed_run_goes_on_where_the_server_has_it_and_its_key_goes_nowhere_else() -> None:
    with serving() as server:
        for words in ((*QUICK[:-1], "hydra.run.dir=run"), ("resume=run", "frames=192")):
            done = online(server, *words)
            assert done.returncode == 0, done.stdout
            assert "waiting for wandb's uploads, at most 4 s" in done.stdout.splitlines()
        (rows,) = server.runs.values()
        assert [json.loads(row)["frames"] for row in rows] == [64, 128, 192]
    assert "side_failures" not in manifest_of(Path("run"))


@pytest.mark.parametrize(
    ("mode", "failure"),
    [
        (401, "OSError: filestream: fatal error: filestream: failed to upload: 401 Unauthorized"),
        (500, "TimeoutError: Timed out finishing run."),
        pytest.param("hang", "TimeoutError: Timed out finishing run.", marks=pytest.mark.slow),
        pytest.param("die", "TimeoutError: Timed out finishing run.", marks=pytest.mark.slow),
    ],
)
def test_a_server_that_fails_is_recorded_and_costs_a_sweep_one_limit(mode, failure) -> None:
    """The status is written before the wait; the sweep's later runs are logged offline."""
    with serving(mode) as server:
        done = online(server, "-m", *QUICK[:-1], "seed=0,1,2", "hydra.sweep.dir=sweep")
    assert done.returncode == 0, done.stdout
    first, *later = (manifest_of(Path(f"sweep/seed={seed}")) for seed in range(3))
    assert {each["status"] for each in (first, *later)} == {"finished"}
    (told,) = first["side_failures"]
    assert told["part"] == "wandb"
    assert told["error"].startswith(failure)
    assert first["ended"] < told["when"] or mode == 401  # which costs no wait
    for each in later:
        (told,) = each["side_failures"]
        assert told["part"] == "wandb's server"
        assert len(list(Path("sweep").glob("seed=[12]/wandb/offline-run-*"))) == 2
    lines = done.stdout.splitlines()
    assert [line for line in lines if line.startswith("waiting for wandb's uploads")] == [
        "waiting for wandb's uploads, at most 4 s"
    ]
    assert "training goes on" not in done.stdout
