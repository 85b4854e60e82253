"""TorchRL's own pendulum, in pure torch: N simulators on any device (``env=pendulum_batch``)."""

from __future__ import annotations

import torch
from tensordict import TensorDictBase
from torchrl.data import Categorical, Composite, Unbounded
from torchrl.envs import PendulumEnv


class Pendulum(PendulumEnv):
    """A pendulum of any batch size that shows what Gymnasium's Pendulum-v1 shows, with its limit.

    ``observation`` [..., 3]: cos and sin of the angle, and its speed. Episodes have 200 steps.
    Dynamics and rewards are PendulumEnv's. Its state is shown next to ``observation``, which
    ``env.observation_keys`` selects. The environment's own generator draws the first states.
    """

    max_episode_steps = 200

    def __init__(self, device: str = "cpu") -> None:
        super().__init__(device=device)

    def _make_spec(self, td_params: TensorDictBase) -> None:
        super()._make_spec(td_params)
        steps = {"steps": Unbounded(shape=(1,), dtype=torch.int64, device=self.device)}
        shown = {"observation": Unbounded(shape=(3,), device=self.device)}
        state = dict(self.full_state_spec.items()) | steps
        self.state_spec = Composite(state).clone()
        # TorchRL hands the state on to the next step only if the environment shows it.
        self.observation_spec = Composite(state | shown).clone()
        flags = ("done", "terminated", "truncated")
        flag = Categorical(2, dtype=torch.bool, shape=(1,), device=self.device)
        self.done_spec = Composite({name: flag.clone() for name in flags})

    def _reset(self, tensordict: TensorDictBase | None, **how: object) -> TensorDictBase:
        begun = super()._reset(tensordict, **how)
        zero = begun["th"].new_zeros((*begun.batch_size, 1), dtype=torch.int64)
        return _shown(begun).set("steps", zero)

    @classmethod
    def _step(cls, tensordict: TensorDictBase) -> TensorDictBase:
        after = _shown(super()._step(tensordict))
        steps = tensordict["steps"] + 1
        over, no = steps >= cls.max_episode_steps, after["done"]
        return after.update({"steps": steps, "done": over, "truncated": over, "terminated": no})


def _shown(state: TensorDictBase) -> TensorDictBase:
    angle = state["th"]
    return state.set("observation", torch.stack([angle.cos(), angle.sin(), state["thdot"]], -1))
