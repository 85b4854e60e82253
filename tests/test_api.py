"""klrl from Python: words or settings in, a run out; in a thread and in a notebook too."""

import json
import subprocess
import sys
import threading
from importlib.resources import files
from pathlib import Path

import pytest
import torch
import yaml
from omegaconf import OmegaConf
from tensordict import TensorDict

import klrl
from klrl.base.errors import ConfigError, Interrupted
from klrl.config import Config
from klrl.runs.folder import RunFolder
from klrl.runs.metrics import TIMES
from tests.conftest import QUICK
from tests.runs.commands import exits

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> klrl.Run:
    """Two iterations of Pendulum, evaluated after each."""
    folder = tmp_path_factory.mktemp("api") / "run"
    torch.set_num_threads(1)
    return klrl.run(*QUICK, "kl.coef=0.3", "eval.every=1", "eval.episodes=2", folder=folder)


def test_a_run_is_what_its_folder_holds(run: klrl.Run) -> None:
    lines = (run.folder / "metrics.jsonl").read_text("utf-8").splitlines()
    assert [{"run": run.manifest["id"], **row} for row in run.rows] == list(map(json.loads, lines))
    assert [row["frames"] for row in run.rows] == [64, 128]
    assert run.manifest["argv"] == ["python", "-m", "klrl", *QUICK, *run.manifest["argv"][-3:]]
    assert run.manifest["status"] == "finished"
    assert isinstance(run.config, Config)
    assert run.config.kl.coef == 0.3
    last = run.rows[-1]
    assert run.summary == {
        "status": "finished",
        "frames": 128,
        "return": last["eval/return"],
        "kl/ref/exact": last["kl/ref/exact"],
        "kl/ref/coef": 0.3,
        "kl/old/exact": last["kl/old/exact"],
        "kl/old/beta": last["kl/old/beta"],
    }
    assert "finished, 128 frames" in repr(run)
    again = klrl.load_run(run)
    assert again.folder == run.folder
    assert again.rows == run.rows


def test_its_policy_its_evaluation_and_its_figure(run: klrl.Run) -> None:
    batch = run.policy()(TensorDict({"observation": torch.zeros(5, 3)}, [5]))
    assert batch["action"].shape == (5, 1)
    assert batch["action_log_prob"].shape == (5,)
    result = run.evaluate(4, seed=3)
    assert len(result.returns) == 4
    assert result.row["eval/return"] == pytest.approx(sum(result.returns) / 4)
    assert run.evaluate(4, seed=3, sampled=True).returns != result.returns
    heavier = run.evaluate(4, "env.kwargs.g=14", seed=3)
    assert heavier.returns != result.returns
    titles = [axes.get_title() for axes in run.figure().axes]
    assert titles == ["Return", "KL", "Coefficient"]


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda run: run.evaluate(0), "episodes=0: give a whole number >= 1"),
        (lambda run: run.evaluate(True), "episodes=True: give a whole number >= 1"),
        (lambda run: run.evaluate(3, seed=-1), "seed=-1: give a whole number >= 0"),
        (lambda run: run.evaluate(3, device="tpu"), "device=tpu: choose auto"),
        (lambda run: run.evaluate(3, 4), "4: evaluation cannot set it"),
        (lambda run: run.policy("first"), "has no checkpoint 'first'"),
        (lambda run: run.policy(device="tpu"), "device=tpu: choose auto"),
    ],
)
def test_what_a_run_cannot_do_is_told_in_one_line(run: klrl.Run, call, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        call(run)
    assert said in str(error.value)
    assert len(str(error.value).splitlines()) == 1


def test_a_run_leaves_torchs_threads_as_they_were() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        klrl.run(*QUICK, "threads=2")
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_python_and_the_command_line_give_the_same_rows(run: klrl.Run) -> None:
    words = [*QUICK, "kl.coef=0.3", "eval.every=1", "eval.episodes=2", "hydra.run.dir=there"]
    assert exits(*words) == 0
    for mine, theirs in zip(run.rows, klrl.load_run("there").rows, strict=True):
        plain = {name for name in mine if not name.startswith("time/")}
        assert {name: mine[name] for name in plain} == {name: theirs[name] for name in plain}


def test_a_stored_config_is_run_again(run: klrl.Run) -> None:
    stored = run.folder / ".hydra" / "config.yaml"
    again = klrl.run(yaml.safe_load(stored.read_text("utf-8")), folder="again")
    assert again.config == run.config
    for mine, theirs in zip(again.rows, run.rows, strict=True):
        assert {k: v for k, v in mine.items() if k not in TIMES} == {
            k: v for k, v in theirs.items() if k not in TIMES
        }
    with pytest.raises(ConfigError, match=r"folder=again: already has a run"):
        klrl.run(OmegaConf.load(stored), folder="again")
    part = {"env": {"name": "gym", "id": "Pendulum-v1"}}
    with pytest.raises(ConfigError, match="actor: nothing is chosen"):
        klrl.run(part)


def test_settings_are_composed_changed_and_run() -> None:
    config = klrl.compose(*QUICK, "kl=legacy")
    assert isinstance(config, Config)
    config.kl.coef = 0.7
    run = klrl.run(config)
    assert run.folder.parent == Path("outputs")
    assert run.rows[-1]["kl/ref/coef"] == 0.7
    assert run.config == config
    config.kl.coef = -0.7
    with pytest.raises(ConfigError, match=r"kl.coef=-0.7: give a number >= 0"):
        klrl.run(config)
    assert len(list(Path("outputs").iterdir())) == 1, "nothing was written"


def with_hook(name: str, arguments: str) -> klrl.Callback:
    """A callback with one more method."""
    method = eval(f"lambda self, {arguments}: None")
    return type("Mine", (klrl.Callback,), {name: method})()


@pytest.mark.parametrize(
    ("holder", "name", "said"),
    [
        (lambda c: c.loss, "dtrag", "KLPENConfig.dtrag: no such setting; did you mean dtarg?"),
        (lambda c: c, "framse", "Config.framse: no such setting; did you mean frames?"),
        (lambda c: c.eval, "often", "EvalConfig.often: no such setting; it has every, episodes,"),
        (lambda c: c.checkpoint, "evry", "did you mean every?"),
    ],
)
def test_a_typo_in_typed_settings_is_refused(holder, name: str, said: str) -> None:
    config = klrl.compose(*QUICK)
    with pytest.raises(AttributeError) as error:
        setattr(holder(config), name, 0.02)
    assert said in str(error.value)
    assert config == klrl.compose(*QUICK)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: klrl.run(["env=pendulum"]), "['env=pendulum']: not a setting; give overrides"),
        (
            lambda: klrl.run({"env": "pendulum"}),
            "{'env': 'pendulum'}: not a setting; give overrides",
        ),
        (lambda: klrl.run("env=pendulum", 3), "3: not a setting"),
        (lambda: klrl.run("seed=0,1"), "several values are a sweep"),
        (lambda: klrl.run("resume=outputs/x"), "resume=outputs/x: resumes a run"),
        (lambda: klrl.run("hydra.run.dir=x"), "hydra.run.dir=x: only the command line reads it"),
        (lambda: klrl.run("sweep=x"), "sweep=x: only the command line reads it"),
        (lambda: klrl.run("kl.coef=\n1"), "kl.coef= 1: "),
        (lambda: klrl.run("seed=???"), "seed: has no value; give one"),
        (lambda: klrl.run(f"{'a' * 300}=1"), "=1: [Errno 36] File name too long"),
        (lambda: klrl.run("seed=1", callbacks=[klrl.Callback]), "give a list of klrl.Callback"),
        (
            lambda: klrl.run("seed=1", callbacks=[with_hook("on_epoch_end", "training")]),
            "callbacks=Mine.on_epoch_end: no such hook; hooks are ended, finished, ",
        ),
        (
            lambda: klrl.run("seed=1", callbacks=[with_hook("iterate", "training, row, batch")]),
            "callbacks=Mine.iterate: no such hook; did you mean iterated?",
        ),
        (lambda: klrl.compose(None), "None: not a setting"),
        (lambda: klrl.compose("resume="), "resume=: resumes a run"),
        (lambda: klrl.load_run(None), "None is not a path"),
        (lambda: klrl.load_run("."), "no manifest.json"),
    ],
)
def test_wrong_calls_are_answered_in_one_line(call, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        call()
    assert said in str(error.value)
    assert len(str(error.value).splitlines()) == 1
    assert not any(Path().iterdir()), "nothing was written"


@pytest.mark.parametrize(
    ("group", "key", "value", "said"),
    [
        ("env", "num_envs", 4.5, "env.num_envs=4.5: give a whole number"),
        (None, "seed", None, "seed=None: "),
        (None, "device", 3, "device=3: choose auto"),
        (None, "kl", "legacy", "kl: its settings name no choice"),
        (None, "eval", None, "eval=None: give its settings"),
    ],
)
def test_wrong_types_in_a_config_are_answered_in_one_line(
    group: str | None, key: str, value: object, said: str
) -> None:
    config = klrl.compose(*QUICK)
    setattr(getattr(config, group) if group else config, key, value)
    with pytest.raises(ConfigError) as error:
        klrl.run(config)
    assert str(error.value).startswith(said)
    assert len(str(error.value).splitlines()) == 1
    assert not any(Path().iterdir()), "nothing was written"


def test_a_run_in_a_thread_and_no_second_one_beside_it() -> None:
    """Signals belong to the main thread; torch's generator to the process."""
    began, refused = threading.Event(), threading.Event()
    ended: list[klrl.Run] = []

    class Wait(klrl.Callback):
        def iterated(self, training, row, batch) -> None:
            began.set()
            assert refused.wait(60)

    thread = threading.Thread(
        target=lambda: ended.append(klrl.run(*QUICK, folder="first", callbacks=[Wait()]))
    )
    thread.start()
    try:
        assert began.wait(60)
        with pytest.raises(ConfigError, match="this process is already training a run"):
            klrl.run(*QUICK, folder="second")
    finally:
        refused.set()
        thread.join(60)
    assert ended[0].summary["status"] == "finished"
    assert not Path("second/manifest.json").exists()
    assert klrl.run(*QUICK, folder="third").rows[0]["kl/ref/k1"] == ended[0].rows[0]["kl/ref/k1"]


class Seen(klrl.Callback):
    """Notes every hook; ends the run after its third iteration."""

    def __init__(self) -> None:
        self.hooks: list[str] = []
        self.rows: list[dict] = []

    def started(self, training) -> None:
        self.hooks.append("started")

    def iterated(self, training, row, batch) -> None:
        self.hooks.append("evaluated" if "eval/return" in row else "iterated")
        self.rows.append(row)
        assert batch.shape == (2, 32)
        assert {"advantage", "action_log_prob"} <= set(batch.keys())
        if training.counters.iteration == 3:
            training.stop()
        row["frames"] = -1  # a copy: the record is not changed

    def ended(self, training) -> None:
        self.hooks.append("ended")


def test_callbacks_see_the_loop_and_can_end_it() -> None:
    seen = Seen()
    words = (*QUICK, "frames=640", "eval.every=2", "eval.episodes=1", "checkpoint.every=100")
    with pytest.raises(Interrupted):
        klrl.run(*words, folder="run", callbacks=iter([seen]))
    assert seen.hooks == ["started", "iterated", "evaluated", "iterated", "ended"]
    run = klrl.load_run("run")
    assert run.summary["status"] == "interrupted"
    assert [row["frames"] for row in run.rows] == [64, 128, 192]
    assert "eval/return" in seen.rows[1]
    assert seen.rows[1].keys() == run.rows[1].keys()


def test_a_callback_that_raises_fails_the_run_and_keeps_its_checkpoint() -> None:
    class Broken(klrl.Callback):
        def iterated(self, training, row, batch) -> None:
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        klrl.run(*QUICK, folder="run", callbacks=[Broken()])
    manifest = RunFolder(Path("run")).manifest
    assert (manifest["status"], manifest["error"]) == ("failed", "KeyError: 'mine'")
    assert any(Path("run").glob("checkpoints/last/*/manifest.json"))


def test_the_parts_are_attributes_and_imported_when_they_are_asked_for() -> None:
    code = (
        "import sys, klrl\n"
        "assert 'torch' not in sys.modules\n"
        "klrl.kl.KLRewardTransform, klrl.losses.KLPENPPOLoss, klrl.Run, klrl.compose\n"
        "assert dir(klrl) == sorted(klrl.__all__)\n"
        "try: klrl.nothing\nexcept AttributeError as e: assert 'nothing' in str(e)\n"
        "else: raise SystemExit(1)\n"
        "import klrl.envs.llm.transforms.kl\n"
        "assert 'transformers.models' not in sys.modules\n"
        "import klrl.envs.transforms as own, klrl.envs.llm.transforms.kl as llm\n"
        "assert own.KLRewardTransform is klrl.kl.KLRewardTransform is not llm.KLRewardTransform\n"
        "assert llm.RetrieveKL is klrl.kl.RetrieveKL and 'RetrieveKL' not in own.__all__\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert files("klrl").joinpath("py.typed").is_file(), "the package is typed"


@pytest.mark.slow
def test_a_run_in_a_notebook_prints_plain_lines() -> None:
    """Executed by nbclient in a kernel of its own."""
    nbformat = pytest.importorskip("nbformat")
    from nbclient import NotebookClient

    words = ", ".join(repr(word) for word in (*QUICK, "frames=640"))
    cells = [
        f"import klrl\nrun = klrl.run({words})",
        "run.rows[-1]['frames']",
        "run.figure()",
        "klrl.run(['env=pendulum'])",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells])
    NotebookClient(notebook, timeout=300, kernel_name="python3", allow_errors=True).execute()
    trained, rows, figure, wrong = (cell.outputs for cell in notebook.cells)
    printed = "".join(out.text for out in trained if out.output_type == "stream")
    assert "finished 640 frames" in printed
    assert not {"\r", "\x1b"} & set(printed), "notebooks know no terminal's codes"
    assert rows[0].data["text/plain"] == "640"
    assert "image/png" in figure[0].data
    assert wrong[0].ename == "ConfigError"
    assert "not a setting" in wrong[0].evalue
