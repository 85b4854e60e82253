"""The state of one Gymnasium environment, read from one copy and written into another.

Read is what the wrappers and the environment keep in plain attributes, generators included, and the
state of a MuJoCo simulation. Other handles (a simulator in C, a window) cannot be read: whether
what is read is enough for an environment is proved in :mod:`klrl.control.env_proof`.
"""

from __future__ import annotations

import marshal
import sys
from collections import ChainMap
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from types import FunctionType, MethodType, ModuleType
from typing import Any

import gymnasium
import numpy as np
from torchrl.data import TensorSpec

from klrl.control.plain_values import Unplain, decode, encode

#: What JSON holds of a copy.
State = dict[str, Any]

#: Of the reset from which a copy is written: it makes what a new one does not have yet.
_SEED = 0
#: Bytes from which on a value is looked up among those that all copies have in common.
_LONG = 256
#: Attributes that lead elsewhere, or say how a copy was made.
_NOT_READ = frozenset(
    ("env", "spec", "_cached_spec", "_saved_kwargs", "metadata", "_metadata", "render_mode")
)
#: Arrays of MuJoCo's data: frames, velocities and forces, as of the last step.
DERIVED = (
    *("xpos", "xquat", "xmat", "xipos", "ximat", "geom_xpos", "geom_xmat", "site_xpos"),
    *("site_xmat", "subtree_com", "cvel", "cinert", "cacc", "cfrc_int", "cfrc_ext"),
    *("qacc", "qfrc_actuator", "actuator_force", "sensordata"),
)
#: Objects whose attributes are not looked into.
_NO_HOLDERS = (type, ModuleType, FunctionType, MethodType, gymnasium.Env, TensorSpec)


class StateMisfit(Exception):
    """A state that is not one of this environment."""


@dataclass(frozen=True)
class Reading:
    """What is read of an environment.

    Attributes:
        own: what its ``get_state()`` returns and ``set_state(state)`` takes, a plain value; then of
            its own attributes the generators alone.
        derived: also :data:`DERIVED`, what a MuJoCo simulation derives from its state. Some tasks
            read that of the step before: ``xpos`` in Ant's and ``xipos`` in Humanoid's reward are
            one ``mj_step`` older than ``qpos``.
    """

    own: bool = False
    derived: bool = False


def offers_state(env: gymnasium.Env) -> bool:
    """Whether the environment has ``get_state`` and ``set_state``."""
    names = ("get_state", "set_state")
    return all(callable(getattr(env.unwrapped, name, None)) for name in names)


def simulates(env: gymnasium.Env) -> bool:
    """Whether it holds a MuJoCo simulation."""
    return any(map(_is_simulation, _attributes(env.unwrapped).values()))


class Reader:
    """Reads the state of copies.

    Args:
        reading: what of it.
        made: a new copy, to be reset here. Tables and other long values that a copy still has in
            common with it are left out of its state.
    """

    def __init__(self, reading: Reading, made: gymnasium.Env) -> None:
        begin(made)
        self._reading, self._tables = reading, [_tables(layer) for layer in _layers(made)]

    def read(self, env: gymnasium.Env) -> State:
        """The state of a copy, as JSON.

        Raises:
            Unplain: its ``get_state()`` returned what is no plain value.
        """
        layers = list(_layers(env))
        state: State = {
            "classes": [type(layer).__name__ for layer in layers],
            "layers": list(map(self._read, layers, self._tables)),
        }
        if self._reading.own:
            state["own"] = encode(env.unwrapped.get_state())
        return state

    def _read(self, layer: Any, tables: Mapping[str, bytes]) -> State:
        """The plain attributes of a wrapper or the environment."""
        read, seen = State(), {id(layer)}
        generators_alone = self._reading.own and layer is layer.unwrapped
        for name, value in _attributes(layer).items():
            if name in _NOT_READ or (name in tables and _bytes(value) == tables[name]):
                continue
            if generators_alone and not isinstance(value, np.random.Generator):
                continue
            try:
                read[name] = _read(value, layer, self._reading.derived, seen)
            except Unplain:
                continue
        return read


def begin(env: gymnasium.Env) -> None:
    """Bring a copy to where writing begins."""
    env.reset(seed=_SEED)


def write(env: gymnasium.Env, state: Mapping[str, Any]) -> None:
    """Put a copy into a state.

    Args:
        env: a new copy: what is left out of the state must be as it was made.
        state: from :meth:`Reader.read` of a copy that was made like it.

    Raises:
        StateMisfit: it is another environment's, or of other versions of its code.
        Exception: whatever the environment raises.
    """
    begin(env)
    layers = list(_layers(env))
    names = [type(layer).__name__ for layer in layers]
    if state["classes"] != names:
        raise StateMisfit(f"the state is one of {state['classes']}, not of {names}")
    for layer, values in zip(layers, state["layers"], strict=True):
        _write(layer, values)
    if "own" in state:
        env.unwrapped.set_state(decode(state["own"]))


# ------------------------------------------------------------------------------------- attributes


def _layers(env: gymnasium.Env) -> Iterator[Any]:
    """The wrappers from the outermost on, then the environment."""
    while isinstance(env, gymnasium.Wrapper):
        yield env
        env = env.env
    yield env


def _attributes(holder: Any) -> MutableMapping[str, Any]:
    """The attributes of an object; of a torch module its modules too."""
    attributes: dict[str, Any] = getattr(holder, "__dict__", {})
    modules = attributes.get("_modules")
    return ChainMap(attributes, modules) if isinstance(modules, dict) else attributes


def _read(value: Any, holder: Any, derived: bool, seen: set[int]) -> Any:
    """An attribute as JSON.

    Raises:
        Unplain: it is a handle.
    """
    if _is_foreign(value):
        raise Unplain("an array in a simulator's memory")
    try:
        return encode(value)
    except Unplain:
        if id(value) in seen:  # once is enough, as of a simulation that a renderer holds too
            raise
        seen.add(id(value))
        if _is_simulation(value):
            return {"simulation": _read_simulation(_model(holder), value, derived)}
        held = _held(value)
        if not held:
            raise
    inside = State()
    for name, item in held.items():
        try:
            inside[name] = _read(item, value, derived, seen)
        except Unplain:
            continue
    if not inside:
        raise Unplain(f"a {type(value).__name__} holds no plain values")
    return {"object": [type(value).__name__, inside]}


def _held(value: Any) -> Mapping[str, Any]:
    """The attributes of an object, as of a running mean; of a space its generator alone."""
    if isinstance(value, gymnasium.Space):
        return {} if value._np_random is None else {"_np_random": value._np_random}
    return {} if isinstance(value, _NO_HOLDERS) else _attributes(value)


def _write(holder: Any, values: Mapping[str, Any]) -> None:
    held = _attributes(holder)
    for name, value in values.items():
        before: Any = held.get(name)
        if isinstance(value, dict) and "simulation" in value:
            if not _is_simulation(before):
                raise StateMisfit(f"{type(holder).__name__}.{name} holds no simulation")
            _write_simulation(_model(holder), before, value["simulation"])
        elif isinstance(value, dict) and "object" in value:
            kind, inside = value["object"]
            if type(before).__name__ != kind:
                raise StateMisfit(f"{type(holder).__name__}.{name} holds no {kind}")
            _write(before, inside)
        else:
            held[name] = decode(value, before)


def _is_array(value: Any) -> bool:
    return type(value) is np.ndarray and not value.dtype.hasobject


def _is_foreign(value: Any) -> bool:
    """Whether an array looks into memory that is not numpy's: what writes there tells it."""
    while _is_array(value) and value.base is not None:
        value = value.base
        if not isinstance(value, np.ndarray):
            return not isinstance(value, bytes)
    return False


def _bytes(value: Any) -> bytes | None:
    """An array or a container as bytes, the same for the same bits; None for all else."""
    if _is_array(value):
        return f"{value.dtype.str}{value.shape}".encode() + value.tobytes()
    if type(value) not in (dict, list, tuple):
        return None
    try:
        return marshal.dumps(value, 2)  # without references, which depend on who else holds it
    except ValueError:
        return None


def _tables(layer: Any) -> dict[str, bytes]:
    """The long values of a copy as made."""
    every = {name: _bytes(value) for name, value in _attributes(layer).items()}
    return {name: held for name, held in every.items() if held is not None and len(held) >= _LONG}


# ----------------------------------------------------------------------------------------- MuJoCo


def _mujoco() -> Any:
    """The package, where an environment imported it."""
    return sys.modules.get("mujoco")


def _is_simulation(value: Any) -> bool:
    mujoco = _mujoco()
    return mujoco is not None and isinstance(value, mujoco.MjData)


def _model(holder: Any) -> Any:
    """The model beside a simulation.

    Raises:
        Unplain: there is none.
    """
    for value in _attributes(holder).values():
        if isinstance(value, _mujoco().MjModel):
            return value
    raise Unplain(f"{type(holder).__name__} has a simulation without a model")


def _read_simulation(model: Any, data: Any, derived: bool) -> State:
    """The integration state: all that ``mj_step`` computes the next one from.

    https://mujoco.readthedocs.io/en/stable/computation/index.html#the-state
    """
    mujoco = _mujoco()
    kind = mujoco.mjtState.mjSTATE_INTEGRATION
    state = np.empty(mujoco.mj_stateSize(model, kind))
    mujoco.mj_getState(model, data, state, kind)
    arrays = {name: encode(np.array(getattr(data, name))) for name in DERIVED if derived}
    return {"state": encode(state), "derived": arrays}


def _write_simulation(model: Any, data: Any, simulation: Mapping[str, Any]) -> None:
    mujoco = _mujoco()
    kind, state = mujoco.mjtState.mjSTATE_INTEGRATION, decode(simulation["state"])
    if state.shape != (mujoco.mj_stateSize(model, kind),):
        raise StateMisfit("the simulation's state has another length")
    mujoco.mj_setState(model, data, state, kind)
    mujoco.mj_forward(model, data)
    for name, value in simulation["derived"].items():
        array = decode(value)
        if getattr(data, name).shape != array.shape:
            raise StateMisfit(f"the simulation's {name} has another shape")
        getattr(data, name)[...] = array
