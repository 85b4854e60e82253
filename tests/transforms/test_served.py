"""The Ray-backed transforms on this machine, against the same transforms in this process."""

import importlib.util
import os
import signal
from collections.abc import Iterator

import pytest
import torch
from tensordict import TensorDict, set_list_to_stack
from torchrl.envs import RewardSum, StepCounter, TransformedEnv
from torchrl.envs.llm import ChatEnv

from klrl.envs.llm.transforms.kl.reward import KLRewardTransform, RayKLRewardTransform
from klrl.envs.llm.transforms.kl.served import start_ray
from klrl.kl import RayRetrieveKL, RetrieveKL
from tests.transforms.llm_toys import conversation, network, tokenizer, wrapper
from tests.transforms.test_control_family import case
from tests.transforms.test_llm_env import Score, Script, reset
from tests.transforms.test_llm_reward import batch

pytestmark = [pytest.mark.services, pytest.mark.timeout(300)]

if importlib.util.find_spec("ray") is None:
    pytest.skip("Ray is not installed", allow_module_level=True)
COEF = 0.5


@pytest.fixture(scope="module", autouse=True)
def _ray_on_loopback() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    ray = start_ray(num_cpus=2, log_to_driver=False)
    assert signal.getsignal(signal.SIGTERM) is before, "Ray's would end a run without a checkpoint"
    yield
    ray.shutdown()


def make_gen():
    return wrapper(network(), log_probs_key="gen")


def make_ref():
    return wrapper(network(seed=1), log_probs_key="ref")


def make_tokens_ref():
    return wrapper(network(seed=1), "tokens")


@pytest.fixture(scope="module")
def served(_ray_on_loopback) -> RayRetrieveKL:
    return RayRetrieveKL(
        gen_model_factory=make_gen,
        ref_model_factory=make_ref,
        coeff=COEF,
        num_cpus=0.5,
        num_gpus=0,
        device="cpu",
        actor_name="kl",
    )


def assert_same(found: TensorDict, expected: TensorDict, *keys) -> None:
    for key in keys:
        torch.testing.assert_close(found["next", key], expected["next", key], atol=1e-6, rtol=0)
        assert found["next", key].any()


def test_models_by_factory_give_the_local_numbers(served) -> None:
    local = RetrieveKL(make_gen(), make_ref(), coeff=COEF)
    found, expected = served(conversation(2)), local(conversation(2))
    for key in ("kl_penalty", "reward", ("log_probs", "full"), ("ref_log_probs", "full")):
        torch.testing.assert_close(
            found["next"].get(key), expected["next"].get(key), atol=1e-6, rtol=0
        )
    assert found["next", "kl_penalty"].abs().max() > 0.1


def test_a_named_actor_serves_several_environments_and_is_reused(served) -> None:
    with set_list_to_stack(True):
        again = RetrieveKL(
            gen_model=None,
            gen_model_factory=make_ref,  # not called: the actor of this name has its models
            ref_model_factory=make_ref,
            service_backend="ray",
            actor_name="kl",
        )
        assert isinstance(again, RayRetrieveKL)
        assert again._actor == served._actor
        local = RetrieveKL(make_gen(), make_ref(), coeff=COEF)
        results = []
        for transform in (served.clone(), again, local):
            env = TransformedEnv(ChatEnv(batch_size=(2,), tokenizer=tokenizer()), Score())
            env.append_transform(transform)
            steps = env.rollout(
                2, Script(), auto_reset=False, tensordict=reset(env), break_when_any_done=False
            )
            results.append([steps[i, t]["next"] for i in range(2) for t in range(2)])
        for found in results[:2]:
            for one, other in zip(found, results[2], strict=True):
                for key in ("kl_penalty", "reward"):
                    torch.testing.assert_close(one[key], other[key], atol=1e-6, rtol=0)
    assert "kl" in repr(again)
    assert "RayRetrieveKL" in repr(again)
    served.coeff = 2.0
    assert again.coeff == 2.0
    served.coeff = COEF


def asked_from_another_process() -> tuple[int, str, torch.Tensor]:
    """As in docs/llm_transforms.md: whoever comes first makes the service, the others find it."""
    kl = RayRetrieveKL(
        gen_model_factory=make_gen,
        ref_model_factory=make_ref,
        coeff=COEF,
        num_cpus=0.5,
        actor_name="kl",
    )
    found = kl(conversation(2))
    return os.getpid(), kl._actor._actor_id.hex(), found["next"].get("kl_penalty")


def test_processes_of_a_job_share_one_service(served) -> None:
    task = start_ray().remote(num_cpus=0.25)(asked_from_another_process)
    expected = RetrieveKL(make_gen(), make_ref(), coeff=COEF)(conversation(2))
    for pid, actor, penalty in start_ray().get([task.remote(), task.remote()]):
        assert pid != os.getpid()
        assert actor == served._actor._actor_id.hex()
        expected_penalty = expected["next"].get("kl_penalty")
        torch.testing.assert_close(penalty, expected_penalty, atol=1e-6, rtol=0)


def test_models_by_value_and_the_reward_transform() -> None:
    data = batch(network())
    local = KLRewardTransform(make_tokens_ref(), coef=COEF)(data.clone())
    for kwargs in (
        {"ref_model": make_tokens_ref(), "service_backend": "ray"},
        {"ref_model_factory": make_tokens_ref, "use_ray_service": True},
    ):
        remote = KLRewardTransform(coef=COEF, num_cpus=0.5, **kwargs)
        assert isinstance(remote, RayKLRewardTransform)
        assert_same(remote(data.clone()), local, "kl_penalty", "reward", "ref_log_prob")
        remote.coef = 0.0
        assert remote.coef == 0.0
        assert float(remote(data.clone())["next", "reward"].sum()) == 6.0
    assert "RayKLRewardTransform" in repr(remote)


def test_the_actors_errors_keep_their_type(served) -> None:
    with pytest.raises(KeyError, match="no history"):
        served(TensorDict({"next": TensorDict({}, [2])}, [2]))
    with pytest.raises(start_ray().exceptions.RayError, match="generate=True"):
        RayKLRewardTransform(
            ref_model_factory=lambda: wrapper(network(), "tokens", generate=True), num_cpus=0.5
        )


def test_what_an_environment_appends_to_it_runs_here() -> None:
    env, actor, reference, _ = case("pendulum")
    kl = RayRetrieveKL(
        actor, reference, coeff=COEF, num_cpus=0.5, kl_key="kl", raw_reward_key="raw"
    )
    for part in (kl, kl.clone()):
        around = TransformedEnv(env, part).append_transform(RewardSum())
        around.insert_transform(0, StepCounter())
        with torch.no_grad():
            after = around.rollout(5, actor, break_when_any_done=False)["next"]
        assert after["step_count"].flatten().tolist() == [1, 2, 3, 4, 5] * 2
        torch.testing.assert_close(after["reward"], after["raw"] - COEF * after["kl"])
        torch.testing.assert_close(after["episode_reward"], after["reward"].cumsum(-2))
        assert part.coeff == COEF
