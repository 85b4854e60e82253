"""``klrl record``: what it writes is what Gymnasium returns; a stopped one leaves nothing."""

import json
from pathlib import Path

import gymnasium
import pytest
import torch
from tensordict import TensorDict

import klrl
from tests.runs.commands import exits, said


def test_a_recording_that_is_stopped_leaves_nothing(monkeypatch, capsys) -> None:
    small = ("env=cartpole", "env.num_envs=2", "frames=128", "collector.steps=64", "logger=none")
    klrl.run(*small, "actor.hidden=[8]", "learner.epochs=1", "eval.every=0", folder="run")
    whole = TensorDict.memmap

    def stopped(data: TensorDict, folder: Path, *more: object) -> None:
        whole(data, folder, *more)
        raise KeyboardInterrupt

    monkeypatch.setattr(TensorDict, "memmap", stopped)
    assert exits("record", "run", "--episodes", "2") == 130
    assert not [path for path in Path("run").iterdir() if "demonstrations" in path.name]


@pytest.mark.parametrize("sampled", [False, True])
def test_recorded_frames_are_what_gymnasium_returns(sampled, capsys) -> None:
    small = ("env.num_envs=2", "frames=256", "collector.steps=64", "actor.hidden=[8]")
    klrl.run(
        "env=cartpole", *small, "learner.epochs=1", "eval.every=0", "logger=none", folder="run"
    )
    how = ("--sampled",) if sampled else ()
    code, out, _ = said(capsys, "record", "run", "--episodes", "5", *how, "--json")
    assert code == 0
    told = json.loads(out)
    data = TensorDict.load_memmap(told["data"])
    env = gymnasium.make("CartPole-v1").unwrapped
    returns = []
    for number in range(5):
        frames = data[data["episode"] == number]
        assert frames["next", "done"][:, 0].nonzero().flatten().tolist() == [len(frames) - 1]
        for frame in frames:
            env.reset()
            env.state = frame["observation"].double().numpy()
            after, reward, terminated, _, _ = env.step(int(frame["action"]))
            torch.testing.assert_close(torch.from_numpy(after), frame["next", "observation"])
            assert float(frame["next", "reward"]) == reward
            assert bool(frame["next", "terminated"]) == terminated
        returns.append(float(frames["next", "reward"].sum()))
    assert told["eval/return"] == sum(returns) / 5
    policy = klrl.load_policy("run")
    best = policy(TensorDict({"observation": data["observation"]}, [len(data)]))["logits"].argmax(
        -1
    )
    assert bool((best == data["action"]).all()) is not sampled
    code, _, error = said(capsys, "record", "run")
    assert (code, "exists already" in error) == (2, True)
    clone = ("env=cartpole", "experiment=clone", "data=run/demonstrations", "frames=4096")
    assert exits(*clone, "eval.every=0", "logger=none", "actor.hidden=[8]") == 0
