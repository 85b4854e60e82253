"""What the first call of a part of one's own finds out is told in a line."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.extending.page import SHORT
from tests.runs.commands import exits

#: Parts that are wrong: what is said of each.
WRONG = """
import gymnasium, numpy as np, torch
from torch import nn
from klrl.kl.controllers import FixedKLController
from klrl.losses.beta import BetaRule
from klrl.losses.policy import PolicyLoss
from maze import Maze
from point import Point
from torchrl.envs import EnvBase

class Detached(PolicyLoss):
    def gain(self, scored, advantage, beta): return scored.log_prob.detach() * advantage
class Mean(PolicyLoss):
    def gain(self, scored, advantage, beta): return (scored.log_prob * advantage).mean()
class Nan(PolicyLoss):
    def gain(self, scored, advantage, beta): return scored.log_prob.log()
class Raises(PolicyLoss):
    def gain(self, scored, advantage, beta): return scored.nothing
class NoSuper(PolicyLoss):
    def __init__(self): pass
    def gain(self, scored, advantage, beta): return scored.log_prob
class Plain: pass
async def later(): pass
class Negative(FixedKLController):
    def move(self, kl, n): self.coef = -1.0
class Text(FixedKLController):
    def move(self, kl, n): return "a"
    def update(self, kl, n=1): return "a"
class Infinite(BetaRule):
    def update(self, kl): return float("inf")
def env(): return Maze(4, 0.0)
class Few(Maze):
    def __init__(self): super().__init__(4, 0.0)
    def step(self, action): return super().step(action)[:4]
class Short(Few):
    def step(self, action): return Maze.step(self, action)
    def seen(self): return np.zeros(3, np.float32)
class NanSeen(Short):
    def seen(self): return np.full(4, np.nan, np.float32)
class Spaceless(gymnasium.Env): pass
class Batched(Point):
    def __init__(self):
        EnvBase.__init__(self, batch_size=[4])
class Worded(Maze):
    def __init__(self):
        super().__init__(4, 0.0)
        self.observation_space = gymnasium.spaces.Text(9)
class Unbounded(Maze):
    def __init__(self):
        super().__init__(4, 0.0)
        self.action_space = gymnasium.spaces.Box(-np.inf, np.inf, (1,))
class Fixed(Maze):
    def __init__(self):
        super().__init__(4, 0.0)
        self.action_space = gymnasium.spaces.Box(1, 1, (1,))
class ShortMask(Maze):
    def __init__(self):
        super().__init__(4, 0.0)
        self.observation_space = gymnasium.spaces.Dict(
            at=self.observation_space,
            inner=gymnasium.spaces.Tuple([gymnasium.spaces.MultiBinary(2)]))
    def seen(self):
        return {"at": super().seen(), "inner": (np.zeros(3, np.int8),)}
class NoKey(ShortMask):
    def seen(self): return {"at": super().seen()["at"]}
class NoReward(Point):
    def _step(self, data): return super()._step(data).exclude("reward")
class Shifted(Point):
    def _reset(self, data=None, **how): return super()._reset().set("position", torch.zeros(2))
class NoSpecs(Point):
    def __init__(self): EnvBase.__init__(self)
class Net(nn.Module):
    def __init__(self, inputs, outputs=1):
        super().__init__()
        self.net, self.spare = nn.Linear(inputs, outputs), nn.Parameter(torch.zeros(2))
    def forward(self, x): return self.net(x) + self.spare.sum()
class Unused(Net):
    def forward(self, x): return self.net(x)
class Dropout(Net):
    def forward(self, x): return nn.functional.dropout(super().forward(x))
class OverRows(Net):
    def forward(self, x): return super().forward(x) - super().forward(x).mean()
class OverSteps(Net):
    def __init__(self, inputs, outputs=1):
        super().__init__(inputs, outputs)
        self.cell = nn.GRU(inputs, inputs, batch_first=True)
    def forward(self, x): return super().forward(self.cell(x)[0])
class Remembers(Net):
    def __init__(self, inputs, outputs=1):
        super().__init__(inputs, outputs)
        self.cell, self.state = nn.GRUCell(inputs, inputs), None
    def forward(self, x):
        flat = x.reshape(-1, x.shape[-1])
        self.state = self.cell(flat, None if len(flat) == 1 else self.state)
        return super().forward(self.state.reshape(x.shape))
def lstm(inputs, outputs=1): return nn.LSTM(inputs, outputs)
class NotFinite(Net):
    def forward(self, x): return super().forward(x) * float("nan")
class OverTime(Net):
    def forward(self, x): return super().forward(x).cumsum(0)
class Wide(Net):
    def forward(self, x): return super().forward(x).mean(-1)
class Double(Net):
    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs)
        self.double()
class Scale(Net):
    def forward(self, x): return super().forward(x), -super().forward(x).exp()
def shifted(log_ratio): return log_ratio ** 2 + 1
def forgets(critic):
    def write(batch): batch["advantage"] = batch["next", "reward"]
    return write
class NoLog: pass
def wrapped(env): return 3
class OffStep(gymnasium.Wrapper):
    def step(self, action): raise ValueError("no wind")
class OffReset(gymnasium.ObservationWrapper):
    def __init__(self, env, wind=1):
        super().__init__(env)
    def observation(self, seen): return seen[self.metadata["nothing"]]
class Broken(Maze):
    def __init__(self): super().__init__(4, 0.0)
    def step(self, action): raise ValueError("no floor")
def in_two(env): return gymnasium.wrappers.ClipAction(OffStep(env))
"""
LOSS, CONTROLLER = "loss=custom loss.target", "controller=custom controller.target"
ENV = "env=custom env.target"
ACTOR = "env=pendulum actor=custom actor.target"
ANSWERS = [
    (f"{LOSS}=wrong:Detached", "gain has no gradient in the policy"),
    (f"{LOSS}=wrong:Mean", "gain returned shape () for positions of shape (8,); give one each"),
    (f"{LOSS}=wrong:Nan", "gain is not finite at finite log-probs"),
    (f"{LOSS}=wrong:Raises", "has no attribute 'nothing' (line "),
    (f"{LOSS}=wrong:NoSuper", "its __init__ does not call PolicyLoss's"),
    (f"{LOSS}=wrong:Plain", "made Plain; derive it from klrl.losses.policy.PolicyLoss"),
    (f"{CONTROLLER}=wrong:Negative", "kl.coef=-1.0 after a KL of 0.01 nats; give a number >= 0"),
    (f"{CONTROLLER}=wrong:Text", "kl.coef='a' after a KL"),
    (f"{CONTROLLER}=wrong:Plain", "derive it from klrl.kl.controllers.FixedKLController"),
    ("loss.beta_rule=custom loss.own_beta_rule.target=wrong:Infinite", "beta=inf after a KL of"),
    (f"{ENV}=wrong:Plain", "made Plain; return a gymnasium.Env"),
    (f"{ENV}=wrong:later", "is an async function; name a plain one"),
    (f"{ENV}=wrong:Few", "step returned tuple; give observation, reward, terminated, truncated"),
    (f"{ENV}=wrong:Short", "observation has shape (3,), its space (4,); fix the environment"),
    (f"{ENV}=wrong:NanSeen", "an observation is not finite; fix the environment"),
    (f"{ENV}=wrong:Spaceless", "has no observation_space; set one in its __init__"),
    (f"{ENV}=wrong:Batched", "has the batch size [4]; return one environment of batch size []"),
    (f"{ENV}=wrong:NoReward", "step wrote no reward, which its spec has; write it"),
    (f"{ENV}=wrong:Shifted", "reset wrote position of shape [2], and its spec says [1]"),
    (f"{ENV}=wrong:NoSpecs", "env.target=wrong:NoSpecs: "),
    (f"{ENV}=wrong:env actor.distribution=normal actor=custom actor.target=wrong:Net",
     "actor.distribution=normal: the actions of env.target=wrong:env are discrete"),
    (f"{ENV}=wrong:Worded", "env.target=wrong:Worded: its observation space is Text, which has no"),
    (f"{ENV}=wrong:env env.observation_keys=[a]", "observation of env.target=wrong:env is a Box,"),
    (f"{ENV}=wrong:Fixed actor=tanh_normal",
     "actions of env.target=wrong:Fixed have a lower bound that is not below the upper one"),
    (f"{ENV}=wrong:ShortMask", "observation's inner.0 has shape (3,), its space (2,); fix the"),
    (f"{ENV}=wrong:NoKey", "observation has no inner.0; fix the environment"),
    (f"{ENV}=wrong:Unbounded actor=custom actor.target=wrong:Net actor.distribution=tanh_normal",
     "actor.distribution=tanh_normal: the actions of env.target=wrong:Unbounded have no finite "
     "bounds to scale to; choose actor.distribution=normal"),
    (f"{ENV}=wrong:Unbounded actor=categorical",
     "actor=categorical: the actions of env.target=wrong:Unbounded are continuous; choose "
     "actor=normal, tanh_normal or mlp"),
    (f"{ACTOR}=wrong:Unused", "its forward does not use spare; remove that parameter"),
    (f"{ACTOR}=wrong:OverSteps", "OverSteps is recurrent (GRU): klrl shows a policy one"),
    (f"{ACTOR}=wrong:Remembers", "Remembers is recurrent (GRUCell): klrl shows a policy one"),
    (f"{ACTOR}=wrong:lstm", "lstm is recurrent (LSTM): klrl shows a policy one observation"),
    (f"{ACTOR}=wrong:Dropout", "two calls give different outputs; leave dropout, noise and hidden"),
    (f"{ACTOR}=wrong:OverRows", "what it says of one observation depends on the others"),
    (f"{ACTOR}=wrong:NotFinite", "its outputs are not finite; look at its initialisation"),
    (f"{ACTOR}=wrong:OverTime", "what it says of one observation depends on the others"),
    (f"{ACTOR}=torch.nn:Linear", "asks for in_features, which klrl does not give (it gives"),
    (f"{ACTOR}=wrong:Wide", "gave (2, 3) for observations (2, 3, 3); give (2, 3, 1), or two"),
    (f"{ACTOR}=wrong:Double", "spare is not float32"),
    (f"{ACTOR}=wrong:Scale", "its second output is the scale of a Gaussian, and it is not above 0"),
    (f"{ACTOR}=wrong:Plain", "made Plain; return a network (torch.nn.Module)"),
    ("env=catch actor=custom actor.target=pixels:Pixels",
     "actor.own_critic=null: klrl's critic beside a network of your own is an MLP, which reads no"),
    ("env=catch actor=custom actor.target=wrong:Net actor.own_critic.target=pixels:Pixels",
     "actor.target=wrong:Net: raised TypeError"),
    (f"{ACTOR}=wrong:Net actor.own_critic.target=wrong:Wide", "actor.own_critic.target=wrong:Wide"),
    ("kl.placement=loss kl.estimator=custom kl.own_estimator.target=wrong:shifted",
     "is 1 where policy and reference agree (log-ratio 0); a divergence is 0 there"),
    ("kl.placement=loss kl.estimator=custom kl.own_estimator.target=wrong:Plain",
     "kl.own_estimator.target=wrong:Plain: name a function of log_ratio"),
    ("advantage=custom advantage.target=wrong:forgets", "wrote no value_target; write it into"),
    ("logger=custom logger.target=wrong:NoLog", "has no method log; add log(self, row)"),
    ("env=cartpole env.wrappers=[wrong:wrapped]", "made int; name a gymnasium.Wrapper"),
    ("env=cartpole env.wrappers=[wrong:OffStep]",
     "klrl: env.wrappers[0].target=wrong:OffStep: raised ValueError: no wind (line "),
    ("env=pendulum env.wrappers=[ClipAction,{target:'wrong:OffReset',args:{wind:2}}]",
     "klrl: env.wrappers[1].target=wrong:OffReset with env.wrappers[1].args={'wind': 2}: raised "
     "KeyError: 'nothing' (line "),
    (f"{ENV}=wrong:env env.wrappers=[wrong:OffReset]",
     "klrl: env.wrappers[0].target=wrong:OffReset with env.wrappers[0].args={'wind': 1}: raised "
     "KeyError: 'nothing' (line "),
    ("env=pendulum env.wrappers=[wrong:in_two]",
     "klrl: env.wrappers[0].target=wrong:in_two: raised ValueError: no wind (line "),
    (f"{ENV}=wrong:Broken env.wrappers=[NormalizeReward]",
     "klrl: env.target=wrong:Broken: raised ValueError: no floor (line "),
]  # fmt: skip


@pytest.mark.integration
def test_each_wrong_part_is_refused_in_one_line(mine: Path, capsys) -> None:
    (mine / "wrong.py").write_text(WRONG, encoding="utf-8")
    for words, said in ANSWERS:
        assert exits(*words.split(), *SHORT, "hydra.run.dir=outputs/run") == 2, words
        told = capsys.readouterr()
        assert told.out == "", words
        assert said in told.err, words
        assert len(told.err.splitlines()) == 1, words
        assert not (mine / "outputs" / "run").exists(), words
