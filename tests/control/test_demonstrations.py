"""Demonstrations: read, served, learned from by maximum likelihood, recorded."""

import json
import math
import os
import shutil
from pathlib import Path

import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

import klrl
from klrl.api import compose
from klrl.base.errors import ConfigError, Interrupted
from klrl.control.run.step import Columns, StepParts, draw, loss_terms
from klrl.runs.returns import final_return, last_recorded
from klrl.train.callbacks import Callback
from klrl.train.loop import Training
from tests.conftest import QUICK
from tests.runs.commands import exits, manifest_of, rows_of, said, timeless

SIGMA = 0.3
U, DISCRETE = torch.ones(200, 1), torch.zeros(200, dtype=torch.long)
PIXEL = torch.ones(200, 1764, dtype=torch.int8)
PIXELS = ("env=catch", "actor=cnn")
KEYED, MASKED = (
    ("env=gym", f"env.id=tests.control.toys:klrl-test/{name}-v0") for name in ("Keyed", "Masked")
)
KEYED += ("env.kwargs.image=false",)
SEVERAL = (*MASKED, "env.kwargs.where=several")
#: Two numbers that change, then masks that allow the even actions.
ALLOWED = torch.tensor([0.0, 0, 1, 0, 1, 0, 1, 0]).repeat(200, 1)
ALLOWED[1, 0] = 1
ALLOWED_TWICE = torch.cat([ALLOWED, ALLOWED[:, 2:]], 1)


def written(folder: str = "data", episodes: int = 8, length: int = 25, **changed: object) -> str:
    """Frames of pendulum: actions are linear in the observation, with noise of SIGMA."""
    generator = torch.Generator().manual_seed(0)
    count = episodes * length
    observation = torch.randn(count, 3, generator=generator)
    noise = SIGMA * torch.randn(count, 1, generator=generator)
    number = torch.arange(count)
    ends = (number % length == length - 1)[:, None]
    frames = {
        "observation": observation,
        "action": observation[:, :1] - 0.5 * observation[:, 1:2] + noise,
        "episode": number // length,
        "next": {"reward": number[:, None].float(), "done": ends, "truncated": ends},
    }
    frames |= changed
    data = TensorDict(frames, [count]).exclude(*(k for k, v in frames.items() if v is None))
    data.memmap(folder)
    return folder


def words(*more: str, data: str = "data") -> tuple[str, ...]:
    of_env = [word for word in QUICK if not word.startswith("collector")]
    return ("experiment=clone", *of_env, f"data={data}", "collector.steps=4", *more)


@pytest.fixture
def training(settings):
    def made(*more: str, data: str = "data") -> Training:
        return Training(settings("experiment=clone", f"data={data}", "collector.steps=4", *more))

    return made


# -------------------------------------------------------------------------------------- the loss


@pytest.mark.parametrize("actor", ["normal", "tanh_normal", "categorical"])
def test_the_gradient_is_that_of_the_likelihood_by_torchs_distributions(training, actor) -> None:
    task = ["env=cartpole"] if actor == "categorical" else []
    more = {"observation": torch.randn(200, 4), "action": torch.randint(2, (200,))} if task else {}
    if actor == "tanh_normal":
        more["action"] = torch.rand(200, 1) * 3 - 1.5
    parts = training(*task, f"actor={actor}", data=written(**more)).parts
    batch = parts.rollout(0).collect()
    parts.estimate_advantage(batch)
    parts.agent.networks.double()
    frames = {
        k: v.double() if v.is_floating_point() else v
        for k, v in batch.items()
        if isinstance(v, torch.Tensor)
    }
    batch = batch.apply(lambda x: x.double() if x.is_floating_point() else x)
    steps = parts.learner.steps
    laid = steps.lay_out(batch)
    laid |= draw(steps.loss, parts.agent.family, laid)
    like = {k: v.float() if v.is_floating_point() else v for k, v in laid.items()}
    problem = StepParts(parts.agent, steps.loss, steps.optimizer.settings, Columns(like))
    coefficients = torch.zeros(3, dtype=torch.float64)
    total = loss_terms(problem, parts.agent.networks(laid["observation"]), laid, coefficients).total
    net = parts.agent.policy_net
    parameters = list(net.parameters())
    found = torch.autograd.grad(total, parameters)

    seen = frames["observation"].flatten(0, 1)
    if net.normalizer is not None and hasattr(net.normalizer, "mean"):
        seen = ((seen - net.normalizer.mean) / net.normalizer.std).clamp(-10, 10)
    first, last = net.trunk[0], net.head
    out = torch.tanh(seen @ first.weight.T + first.bias) @ last.weight.T + last.bias
    action = frames["action"].flatten(0, 1)
    if actor == "categorical":
        log_prob = torch.distributions.Categorical(logits=out).log_prob(action)
    else:
        u = torch.atanh(action / 2) if actor == "tanh_normal" else action
        log_prob = torch.distributions.Normal(out, net.log_std.exp()).log_prob(u).sum(-1)
    expected = torch.autograd.grad(-log_prob.mean(), parameters)
    tolerance = 1e-6 if actor == "tanh_normal" else 1e-9  # atanh was rounded to float32
    for ours, by_hand in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, by_hand, rtol=tolerance, atol=tolerance)


def test_a_clone_ends_at_the_entropy_of_the_data(training) -> None:
    """The policy of the data is a Gaussian: no likelihood is better than minus its entropy."""
    written(episodes=100)
    run = klrl.run(*words("frames=30000", "env.num_envs=64", "optim.lr=0.01", "actor.hidden=[32]"))
    entropy = 0.5 * math.log(2 * math.pi * math.e * SIGMA**2)
    rows = rows_of(run.folder)
    best = min(row["nll/held_out"] for row in rows)
    assert rows[0]["nll/held_out"] > 1.3
    assert final_return(last_recorded(rows)) is None  # the data's is not the policy's
    assert abs(best - entropy) < 0.1
    about = next((run.folder / "checkpoints" / "best").iterdir()) / "manifest.json"
    text = json.loads(about.read_text("utf-8"))
    at = min(rows, key=lambda row: row["nll/held_out"])
    assert f"frames-{int(at['frames']):012d}" == about.parent.name, text


# ------------------------------------------------------------------------------------ the reader


def test_a_pass_serves_every_frame_once_and_holds_whole_episodes_out(training) -> None:
    written()
    data = training("collector.held_out=0.25").parts.data
    assert len(data._held) == 50
    served = {}
    frames = data.frames["observation"][:, 0].tolist()
    for _ in range(19):  # 150 frames are 37 pieces of 4, two in a rollout: pass 1 ends in number 19
        batch = data.collect()
        for piece in batch["observation"][..., 0]:
            start = frames.index(float(piece[0]))
            assert piece.tolist() == [frames[(start + i) % 150] for i in range(4)]
            served[start] = served.get(start, 0) + 1
    assert sum(served.values()) == 38
    assert len(served) >= 37
    held = set(data._held["observation"][:, 0].tolist())
    assert not held & set(frames)


def test_ends_of_episodes_and_next_observations(training) -> None:
    written(episodes=3, length=40)
    frames = training("collector.held_out=0").parts.data.frames
    ends = frames["next", "done"][:, 0].nonzero()[:, 0].tolist()
    assert ends == [39, 79, 119]
    assert frames["next", "observation"][5].tolist() == frames["observation"][6].tolist()
    assert frames["next", "observation"][39].tolist() == frames["observation"][39].tolist()
    number = torch.arange(120) // 40
    written("by_number", 3, 40, episode=number, next={"reward": torch.arange(120)[:, None].float()})
    written("by_done", 3, 40, episode=None)
    for folder in ("by_number", "by_done"):
        other = training("collector.held_out=0", data=folder).parts.data.frames
        assert (other["next", "done"] == frames["next", "done"]).all()


def test_copies_that_follow_one_another_in_a_buffer_are_cut_apart(training) -> None:
    """A rollout [2, 100] without an end, flattened: frame 99 is followed by the other copy's."""
    seen = torch.arange(202.0).reshape(2, 101, 1).expand(2, 101, 3)
    after = {"observation": seen[:, 1:].flatten(0, 1), "reward": torch.ones(200, 1)}
    written(observation=seen[:, :-1].flatten(0, 1), episode=None, next=after)
    parts = training("collector.held_out=0").parts
    frames = parts.data.frames
    assert frames["next", "done"][:, 0].nonzero()[:, 0].tolist() == [99, 199]
    assert frames["next", "truncated"][99].item()
    assert "2 episodes (1 cut where next.observation is not the next frame's" in parts.data.note
    piece = frames[98:102][None]
    parts.estimate_advantage(piece)
    config, value = parts.config, parts.agent.critic.module(torch.full((1, 3), 100.0)).item()
    later = config.env.reward_scale + config.advantage.gamma * value
    assert piece["value_target"][0, 1].item() == pytest.approx(later, rel=1e-5)


def test_a_replay_buffers_dump_and_one_hot_actions_are_read(training) -> None:
    action = torch.randint(2, (200,))
    written(observation=torch.randn(200, 4), action=torch.eye(2)[action].bool())
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(500))
    buffer.extend(TensorDict.load_memmap("data"))
    buffer.dumps("buffer")
    for folder in ("data", "buffer"):
        frames = training("env=cartpole", "collector.held_out=0", data=folder).parts.data.frames
        assert frames["action"].tolist() == action.tolist()


def test_bytes_indices_and_allowed_actions_are_read(training) -> None:
    whole = torch.arange(200)[:, None].expand(200, 1764)
    written(observation=whole.double(), action=DISCRETE)
    frames = training(*PIXELS, "collector.held_out=0").parts.data.frames
    assert (frames["observation"] == whole).all()
    for name, task, seen, action in (
        ("keyed", KEYED, (torch.arange(200.0) % 4)[:, None].expand(200, 6), DISCRETE + 2),
        ("masked", MASKED, ALLOWED, DISCRETE + 4),
        ("several", SEVERAL, ALLOWED_TWICE, torch.stack([DISCRETE, DISCRETE + 4], 1)),
    ):
        written(name, observation=seen, action=action)
        frames = Training(
            compose(*words("collector.held_out=0", *task, data=name))
        ).parts.data.frames
        assert (frames["observation"] == seen).all()
        assert (frames["action"] == action).all()


def test_wrong_rewards_are_0_where_nothing_learns_from_them(training) -> None:
    written(next={"reward": torch.full((200, 1), math.nan)})
    frames = training("loss.critic_coeff=0").parts.data.frames
    assert (frames["next", "reward"] == 0).all()
    written(next={"reward": torch.full((200, 1), 2.0)})
    frames = training("loss.critic_coeff=0").parts.data.frames
    assert (frames["next", "reward"] == 2).all(), "they are recorded"
    written(next={"reward": torch.full((200, 1), math.nan)})
    for critic in ((), ("loss=custom", "loss.target=klrl.losses.policy:LikelihoodLoss")):
        with pytest.raises(ConfigError, match="next.reward is not finite"):
            training(*critic, *["loss.critic_coeff=0"] * bool(critic))


def test_statistics_are_those_of_the_data_and_stay(training) -> None:
    written()
    parts = training("env.normalize_observation=true").parts
    seen = parts.data.frames["observation"].double()
    normalizer = parts.agent.normalizer
    torch.testing.assert_close(normalizer.mean.double(), seen.mean(0), atol=1e-6, rtol=0)
    torch.testing.assert_close(normalizer.std.double(), seen.std(0, unbiased=False))
    parts.update_normalizer(parts.rollout(0).collect())
    assert float(normalizer.count) == len(seen)


@pytest.mark.parametrize(
    ("changed", "more", "says"),
    [
        (
            {"action": torch.zeros(200, 2)},
            (),
            "its action has 2 numbers per frame, the task's has 1",
        ),
        ({"observation": torch.zeros(200, 4)}, (), "its observation has 4 numbers per frame"),
        ({"observation": torch.full((200, 3), math.nan)}, (), "its observation is not finite"),
        ({"action": None}, (), "holds no action"),
        ({"action": torch.full((200, 1), 1e38)}, (), "its action is not finite, or above 1e+15"),
        ({"episode": torch.full((200,), math.nan)}, (), "its episode is not finite"),
        (
            {"observation": torch.zeros(200, 4), "action": torch.full((200, 2), 0.5)},
            ("env=cartpole",),
            "has the action [0.5, 0.5], and the task's are whole numbers from 0 to below [2]",
        ),
        (
            {"action": torch.full((200, 1), 2.5)},
            ("actor=tanh_normal",),
            "has the action 2.5, out of",
        ),
        ({"next": {"done": torch.zeros(200, 1, dtype=torch.bool)}}, (), "loss.critic_coeff=0"),
        (
            {"observation": torch.zeros(200, 4), "action": torch.full((200,), 2)},
            ("env=cartpole",),
            "has the action [2.0], and the task's are whole numbers from 0 to below [2]",
        ),
        ({"episode": None, "next": {"reward": torch.zeros(200, 1)}}, (), "holds one episode"),
        (
            {"action": torch.tanh(U), "pre_tanh": U},  # from bounds of 1, and the task's are 2
            ("actor=tanh_normal",),
            "its pre_tanh and its action disagree within the task's bounds; drop pre_tanh",
        ),
        (
            {"observation": torch.full((200, 1764), 0.5), "action": DISCRETE},
            PIXELS,
            "its observation has 0.5, which is no byte, index or mask of the task",
        ),
        (
            {"observation": -PIXEL, "action": DISCRETE},
            PIXELS,
            "its observation has -1, which",
        ),
        (
            {
                "observation": torch.zeros(200, 6),
                "action": DISCRETE,
                "next": {"observation": torch.full((200, 6), 4.0), "reward": torch.zeros(200, 1)},
            },
            KEYED,
            "its next.observation has 4, which",
        ),
        (
            {"observation": ALLOWED, "action": DISCRETE + (torch.arange(200) == 7)},
            MASKED,
            "its frame 7 has the action 1, which action_mask excludes",
        ),
        (
            {"observation": ALLOWED_TWICE, "action": torch.stack([DISCRETE, 2 * DISCRETE + 3], 1)},
            SEVERAL,
            "its frame 0 has the action [0, 3], which action_mask excludes",
        ),
        ({"observation": torch.zeros(200, 3)}, (), "its observation is the same in all 200 frames"),
        ({}, ("collector.steps=400",), "collector.steps=400: data=data has 175 frames"),
    ],
)
def test_data_that_do_not_fit_are_refused_and_nothing_is_written(
    changed, more, says, capsys
) -> None:
    written(**changed)
    code, _, error = said(capsys, *words(*more))
    assert (code, error.count("\n")) == (2, 1)
    assert says in error
    assert not any(Path().glob("outputs/*"))


# --------------------------------------------------------------------------------------- the run


class _Stop(Callback):
    def iterated(self, training, row, batch) -> None:
        if row["iteration"] == 5:
            training.stop()


@pytest.mark.integration
def test_a_resumed_run_is_the_same_to_the_bit_and_refuses_other_data(capsys) -> None:
    written()
    how = words("frames=80", "env.normalize_reward=true")
    klrl.run(*how, folder="whole")
    with pytest.raises(Interrupted):
        klrl.run(*how, folder="part", callbacks=[_Stop()])
    TensorDict.load_memmap("data")["action"][0] += 1
    code, _, error = said(capsys, "resume=part")
    assert code == 2
    assert "data=data: its frames have changed since the run began" in error
    TensorDict.load_memmap("data")["action"][0] -= 1
    written()
    assert exits("resume=part") == 0
    assert timeless(rows_of(Path("whole"))) == timeless(rows_of(Path("part")))
    assert exits("diff", "--bits", "whole", "part") == 0


@pytest.mark.integration
def test_it_ends_early_is_finished_true_and_begins_reinforcement_learning(capsys) -> None:
    written()
    far = (
        "frames=4000",
        "optim.lr=1",
        "collector.patience=3",
        "eval.evaluations=2",
        "eval.every=null",
    )
    code, out, _ = said(capsys, *words(*far, "hydra.run.dir=run", "eval.final=2"))
    assert code == 0
    rows = rows_of(Path("run"))
    best = min(rows, key=lambda row: row["nll/held_out"])
    assert rows[-1]["iteration"] == best["iteration"] + 3 < 500
    assert f"best at iteration {best['iteration']:.0f}, and not in the 3 after it" in out
    assert "eval/best_return" in rows[-1]
    assert manifest_of(Path("run"))["status"] == "finished"
    assert exits("verify", "run") == 0
    assert exits("resume=run") == 0
    assert rows_of(Path("run")) == rows
    near = ("actor.init=run", "reference=checkpoint", "reference.path=run", "kl.coef=1")
    assert exits(*QUICK, *near, "hydra.run.dir=near") == 0
    assert rows_of(Path("near"))[0]["kl/ref/exact"] == pytest.approx(0, abs=1e-6)
    assert exits("kl", "near", "--to", "run", "--episodes", "2") == 0


def test_pre_tanh_that_was_recorded_is_read_where_the_action_is_saturated(training) -> None:
    u = torch.full((200, 1), 9.0)
    written(action=2 * torch.tanh(u))
    data = training("actor=tanh_normal").parts.data
    assert float(data.frames["pre_tanh"].max()) == pytest.approx(math.atanh(1 - 1e-6), abs=1e-3)
    written("known", action=2 * torch.tanh(u), pre_tanh=u)
    assert float(training("actor=tanh_normal", data="known").parts.data.frames["pre_tanh"][0]) == 9


@pytest.mark.integration
def test_a_file_that_was_cut_is_refused_and_stays_as_it_is(capsys) -> None:
    written()
    cut = Path("data/observation.memmap")
    cut.write_bytes(cut.read_bytes()[:100])
    code, _, error = said(capsys, *words())
    assert (code, cut.stat().st_size) == (2, 100)
    assert "data=data: cannot be read (observation.memmap has 100 bytes, not 2,400)" in error


@pytest.mark.integration
@pytest.mark.timeout(120)
def test_a_pipe_or_an_endless_file_in_the_data_is_refused(capsys) -> None:
    def sparse(path: Path) -> None:
        path.touch()
        os.truncate(path, 30 * 10**9)

    for name in ("meta.json", "next/meta.json", "storage_metadata.json", "action.memmap"):
        for make in (os.mkfifo, sparse, lambda path: path.symlink_to("/dev/zero")):
            if (name, make) == ("action.memmap", sparse):
                continue  # an entry may have more bytes than are read
            shutil.rmtree("data", ignore_errors=True)
            place = Path(written(), name)
            place.unlink(missing_ok=True)
            make(place)
            code, _, error = said(capsys, *words())
            assert code == 2
            told = "30,000,000,000 bytes" if make is sparse else "is not a regular file"
            assert "data=data: cannot be read (" in error
            assert told in error


class Opens:
    """Whoever unpickles it leaves a file."""

    def __reduce__(self) -> tuple:
        return (Path.touch, (Path("ran"),))


def pickled(form: str) -> str:
    """Frames with an entry that is pickled."""
    entry: object = NonTensorData(Opens(), batch_size=[200])
    if form == "a stack":
        entry = NonTensorStack(*(NonTensorData(Opens()) for _ in range(200)))
    written("whole")
    data = TensorDict.load_memmap("whole", allow_pickle=False).clone()
    data["next", "note" if form == "nested" else "other"] = entry
    if form == "an archive":
        data.save("data.tdz", archive=True)
    else:
        data.memmap("data/storage" if form == "a buffer" else "data")
    Path("ran").unlink(missing_ok=True)  # TensorDict reads what it has written
    return "data.tdz" if form == "an archive" else "data"


@pytest.mark.integration
@pytest.mark.filterwarnings("ignore::FutureWarning")  # tensordict warns, then unpickles
@pytest.mark.parametrize("form", ["an entry", "nested", "a stack", "an archive", "a buffer"])
def test_nothing_in_data_is_unpickled(capsys, form: str) -> None:
    data = pickled(form)
    code, _, error = said(capsys, *words(data=data))
    assert not Path("ran").exists()
    assert code == 2
    assert "pickle" in error
