"""``klrl export``: writes a control policy as an ONNX file that acts as klrl does."""

from __future__ import annotations

import logging
import warnings
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import torch
from gymnasium import Space, spaces
from tensordict import TensorDictBase
from torch import Tensor, nn

from klrl.base.errors import ConfigError, in_one_line, user_code
from klrl.base.files import replacing, writing
from klrl.base.seeds import derived_seed
from klrl.config import Config, CustomEnvConfig
from klrl.control.env.contract import conversion
from klrl.control.env.copies import make_copies, transformed
from klrl.control.env.observation import MASK, Layout, ObservationPart
from klrl.control.policy.encoders import Mixed
from klrl.control.policy.networks import Agent
from klrl.control.run.job_checks import make_checked
from klrl.control.run.load import trained_agent
from klrl.control.run.rollout import VectorRollout
from klrl.domains import CONTROL
from klrl.runs.checkpoint import Counters, load_component
from klrl.runs.folder import run_id
from klrl.train.evaluate import stored_job

#: In how many observations onnxruntime has to act as klrl does.
_COMPARED = 1000
#: The largest allowed difference from a number x of klrl, as a multiple of max(1, abs(x)).
_LIMIT = 1e-5
#: Kind of an entry -> the dtype of its input.
_DTYPES = {"vector": np.float32, "index": np.int64, "image": np.uint8, "mask": np.int8}
_CPU = torch.device("cpu")

Inputs = dict[str, np.ndarray]


@user_code()
def export_run(run: str, file: Path, *, which: str = "last") -> str:
    """Write the ``last`` or ``best`` policy of a control run to a new file; return what to print.

    Raises:
        ConfigError: no such run or checkpoint, an existing file, a policy that torch.export cannot
            follow, or one that acts differently in onnxruntime. Nothing is written.
    """
    if file.suffix != ".onnx" or file.exists() or file.is_symlink():
        raise ConfigError(f"FILE={file}: give the name of a new file that ends with .onnx")
    folder, config = stored_job(run, "RUN", (), episodes=None, seed=0, device="cpu")
    assert isinstance(config, Config)
    agent, env = trained_agent(folder, which), make_checked(config.env)
    env.close()
    deployed = Deployed(agent, env.action_space)
    copies = make_copies(config.env, seed=derived_seed(0, "export"), num_envs=1)
    rollout = VectorRollout(transformed(copies), agent, _COMPARED, _CPU)
    rollout.sampled = False
    played = rollout.collect()[0]
    rollout.close()
    inputs = deployed.inputs(played["observation"].numpy())
    model = _traced(deployed, inputs, run)
    _compare(model, inputs, played, deployed, run)
    onnx.helper.set_model_props(model, _properties(folder, config, which, deployed))
    file.parent.mkdir(parents=True, exist_ok=True)
    with replacing(file) as partial, writing(partial) as opened:
        opened.write(model.SerializeToString())
    return (
        f"{file}: the {which} checkpoint of {run}, from {', '.join(inputs)} to action; "
        f"onnxruntime acts as klrl does in {_COMPARED:,} observations"
    )


class Deployed(nn.Module):
    """The policy as a function of what the environment shows, to what the environment takes.

    Inputs are the entries of a layout, each [B, *shape]; without a layout, the flat observation
    [B, D]. Outputs are the most likely action [B, *shape] and the distribution's parameters.
    """

    def __init__(self, agent: Agent, space: Space) -> None:
        super().__init__()
        self.net, self.family, self.space = agent.policy_net, agent.family, space
        if isinstance(trunk := self.net.trunk, Mixed):  # bfloat16, on some processors
            self.net.trunk = nn.Sequential(*trunk)
        whole = ObservationPart("", (), "vector", (self.net.inputs,))
        self.layout = agent.layout or Layout((whole,), "float32")
        self.shape, self.bounds = space.shape or (), list[Tensor]()
        if isinstance(space, spaces.Box):
            self.bounds = [torch.from_numpy(space.low), torch.from_numpy(space.high)]
        self.start = torch.from_numpy(np.array(getattr(space, "start", 0), space.dtype))

    def forward(self, *entries: Tensor) -> tuple[Tensor, ...]:
        """Return (action, parameters...)."""
        parts = []
        for entry, value in zip(self.layout.entries, entries, strict=True):
            flat = value.reshape(-1, entry.size)
            if entry.kind == "index":  # klrl counts from 0
                flat = flat - flat.new_tensor(entry.starts)
            parts.append((flat != 0 if entry.kind == "mask" else flat).float())
        parameters = self.net(torch.cat(parts, -1))
        named = dict(zip(self.family.param_keys, parameters, strict=True))
        mode = self.family.action(self.family.act(named, parameters[0].new_zeros(())))
        action = mode.reshape(-1, *self.shape).to(self.start.dtype) + self.start
        return action.clamp(*self.bounds) if self.bounds else action, *parameters

    def inputs(self, packed: np.ndarray) -> Inputs:
        """Split packed observations [F, D] into the inputs that the environment would give."""
        found = {}
        for entry, place in self.layout.places():
            # Without the first word, a key such as ``logits`` would also name an output.
            name = "observation" + f".{entry.key}" * bool(entry.key)
            value = packed[:, place].astype(_DTYPES[entry.kind])
            if entry.kind == "index":
                value += np.array(entry.starts)
            found[MASK if entry.kind == "mask" else name] = value.reshape(-1, *entry.shape)
        return found


def _traced(deployed: Deployed, inputs: Inputs, run: str) -> onnx.ModelProto:
    """Convert a policy to ONNX, for any number of observations."""
    two = tuple(torch.from_numpy(value[:2]) for value in inputs.values())
    free = tuple({0: torch.export.Dim("batch")} for _ in two)
    outputs = ["action", *deployed.family.param_keys]
    logging.disable(logging.WARNING)  # torch logs, warns and prints about itself
    try:
        with redirect_stderr(StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            graph = torch.export.export(deployed.eval(), two, dynamic_shapes=(free,))
            program = torch.onnx.export(
                graph, input_names=[*inputs], output_names=outputs, dynamo=True, verbose=False
            )
    except Exception as error:  # the exporter or a custom network may raise anything
        raise ConfigError(
            f"RUN={run}: torch.export cannot follow its policy ({in_one_line(error, 120)}); use "
            "only operations on tensors, for any number of observations"
        ) from error
    finally:
        logging.disable(logging.NOTSET)
    assert program is not None
    return program.model_proto


def _compare(
    model: onnx.ModelProto, inputs: Inputs, played: TensorDictBase, deployed: Deployed, run: str
) -> None:
    """Refuse a file whose numbers in onnxruntime are not those of klrl."""
    found = onnxruntime.InferenceSession(model.SerializeToString()).run(None, inputs)
    family, ours, convert = deployed.family, played["action"], conversion(deployed.space)
    if deployed.bounds:
        ours = ours.clamp(*(bound.flatten() for bound in deployed.bounds))
    else:  # by the file's logits, since rounding decides between equally likely actions
        ours = family.act({"logits": torch.from_numpy(found[1])}, torch.zeros(()))
    given = ours.numpy() if convert is None else list(convert(ours.numpy()))
    expected = [np.array(given), *(played[key].numpy() for key in family.param_keys)]
    for x, theirs in zip(expected, found, strict=True):
        difference = np.abs(theirs - x) / np.maximum(1, np.abs(x))
        if not (difference <= _LIMIT).all():  # NaN is refused, too
            raise ConfigError(
                f"RUN={run}: onnxruntime acts differently, by {difference.max():.2g} in one of "
                f"{_COMPARED:,} observations; a custom network must do the same in torch.export"
            )


def _properties(folder: Path, config: Config, which: str, deployed: Deployed) -> dict[str, str]:
    """Describe the policy, for the file's ``metadata_props``."""
    counters, env, space = Counters(), config.env, deployed.space
    load_component(folder, which, "counters", counters, _CPU)
    arguments = env.args if isinstance(env, CustomEnvConfig) else env.kwargs
    limits = {x: getattr(space, x) for x in ("low", "high", "start") if hasattr(space, x)}
    return {
        "run": str(run_id(folder)),
        "checkpoint": f"{which}, {counters.frames} frames",
        "task": f"{env.named} {env.arguments}={arguments}",
        "observation": "; ".join(map(str, deployed.layout.entries)),
        **{name: " ".join(map(str, np.ravel(value))) for name, value in limits.items()},
        "distribution": deployed.family.name,
        "mode": CONTROL.mode,
    }
