"""A small environment with nested keys and two action heads, and policies of several heads."""

from collections.abc import Mapping

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import (
    CompositeDistribution,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
)
from torch import Tensor, nn
from torch.distributions import Distribution, Independent, Normal
from torchrl.data import Bounded, Categorical, Composite, Unbounded
from torchrl.envs import EnvBase
from torchrl.modules import IndependentNormal


class TenSteps(EnvBase):
    """Ten steps an episode; ``seen`` and ``reward`` are its subclass's."""

    def __init__(self, *batch: int) -> None:
        super().__init__(batch_size=torch.Size(batch))
        flag = Categorical(2, dtype=torch.bool, shape=(*batch, 1))
        flags = {key: flag.clone() for key in ("done", "terminated", "truncated")}
        self.done_spec = Composite(**flags, shape=batch)
        self._steps = torch.zeros(*batch, 1, dtype=torch.long)

    def seen(self) -> dict[str, object]:
        raise NotImplementedError

    def rewards(self, tensordict: TensorDictBase) -> dict[str | tuple[str, str], torch.Tensor]:
        raise NotImplementedError

    def _reset(self, tensordict: TensorDictBase | None = None, **_: object) -> TensorDictBase:
        mask = None if tensordict is None else tensordict.get("_reset", None)
        self._steps[mask if mask is not None else slice(None)] = 0
        return self._state(torch.zeros(*self.batch_size, 1, dtype=torch.bool))

    def _state(self, done: torch.Tensor) -> TensorDict:
        flags = {"done": done, "terminated": torch.zeros_like(done), "truncated": done.clone()}
        return TensorDict({**self.seen(), **flags}, self.batch_size)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        self._steps += 1
        return self._state(self._steps >= 10).update(self.rewards(tensordict))

    def _set_seed(self, seed: int | None) -> None:
        torch.manual_seed(seed or 0)


class TwoHeads(TenSteps):
    """Observation ("agent", "seen") [N, 3]; actions ("agent", "move") [N, 2], ("agent", "press").

    The reward ("agent", "reward") is minus the squared distance of the move. The actions may be
    below another key than ``agent``.
    """

    def __init__(self, num_envs: int = 2, below: str = "agent") -> None:
        n, self.below = num_envs, below
        super().__init__(n)
        seen = Composite(seen=Unbounded(shape=(n, 3)), shape=(n,))
        self.observation_spec = Composite(agent=seen, shape=(n,))
        action = Composite(
            move=Bounded(-1.0, 1.0, shape=(n, 2)), press=Categorical(3, shape=(n,)), shape=(n,)
        )
        self.action_spec = Composite({below: action}, shape=(n,))
        reward = Composite(reward=Unbounded(shape=(n, 1)), shape=(n,))
        self.reward_spec = Composite(agent=reward, shape=(n,))

    def seen(self) -> dict[str, object]:
        return {"agent": {"seen": torch.randn(*self.batch_size, 3)}}

    def rewards(self, tensordict: TensorDictBase) -> dict[str | tuple[str, str], torch.Tensor]:
        return {("agent", "reward"): -(tensordict[self.below, "move"] ** 2).sum(-1, keepdim=True)}


class Heads(nn.Module):
    """Parameters of both heads."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(3, 7)

    def forward(self, seen: torch.Tensor) -> tuple[torch.Tensor, ...]:
        loc, log_scale, logits = self.net(seen).split((2, 2, 3), -1)
        return loc, log_scale.tanh().exp(), logits


def composite(
    net: nn.Module,
    heads: Mapping[str, type],
    seen: str | tuple[str, str] = "observation",
    below: str | None = None,
    *,
    one_key: bool = False,
) -> ProbabilisticTensorDictSequential:
    """A policy over heads, as TorchRL's composite distributions want it.

    Args:
        net: from an observation to loc and scale, or logits, of one head after the other.
        heads: the distribution of each; its action is below ``below`` where that is given.
        one_key: whether the policy names ``below`` as its action, and not each head's key.
    """
    categorical = torch.distributions.Categorical
    params = [
        ("params", head, name)
        for head, kind in heads.items()
        for name in (("logits",) if kind is categorical else ("loc", "scale"))
    ]
    keys = {head: (below, head) if below else head for head in heads}
    return ProbabilisticTensorDictSequential(
        TensorDictModule(net, [seen], params),
        ProbabilisticTensorDictModule(
            in_keys=["params"],
            out_keys=[below] if one_key else list(keys.values()),
            distribution_class=CompositeDistribution,
            distribution_kwargs={
                "distribution_map": dict(heads),
                **({"name_map": keys} if below else {}),
            },
            return_log_prob=True,
            default_interaction_type="random",
        ),
    )


def two_headed_actor(
    below: str = "agent", *, one_key: bool = False
) -> ProbabilisticTensorDictSequential:
    heads = {"move": IndependentNormal, "press": torch.distributions.Categorical}
    return composite(Heads(), heads, ("agent", "seen"), below, one_key=one_key)


def by_hand(model: nn.Module, batch: TensorDictBase) -> tuple[tuple[Distribution, ...], Tensor]:
    """Return both heads' distributions, and the sum of their log-probs."""
    loc, scale, logits = model[0].module(batch["agent", "seen"])
    dists = Independent(Normal(loc, scale), 1), torch.distributions.Categorical(logits=logits)
    below = "action" if "action" in batch.keys() else "agent"
    actions = batch[below, "move"], batch[below, "press"]
    return dists, sum(d.log_prob(a) for d, a in zip(dists, actions, strict=True))
