"""PPO in JAX, the environment included: rollout, GAE and update are one compiled function.

It is written in PureJaxRL's way (arXiv:2210.05639), with observations normalised, but without KL
or rows: what a simulator that can be compiled allows. In an environment of its own: make bench-jax.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any, NamedTuple

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false"

import jax
import jax.numpy as jnp
import optax
from jax import Array

from benchmarks.peers.common import Clock, make_parser, report

PACKAGES = ("jax", "jaxlib", "optax", "numpy")
WIDTH, CLIP, MAX_NORM, EPS = 64, 0.2, 0.5, 1e-5


class Task(NamedTuple):
    """An environment of Gymnasium's classic control; the last number of a state counts steps."""

    reset: Callable[[Array], Array]  # key -> state
    observe: Callable[[Array], Array]
    step: Callable[[Array, Array], tuple[Array, Array, Array]]  # -> state, reward, terminated
    inputs: int
    actions: int
    continuous: bool
    limit: int  # steps of an episode


def reset_pendulum(key: Array) -> Array:
    high = jnp.array([jnp.pi, 1.0])
    return jnp.append(jax.random.uniform(key, (2,), minval=-high, maxval=high), 0.0)


def step_pendulum(state: Array, action: Array) -> tuple[Array, Array, Array]:
    angle, speed, count = state
    torque = jnp.clip(action[0], -2, 2)
    wrapped = (angle + jnp.pi) % (2 * jnp.pi) - jnp.pi
    reward = -(wrapped**2 + 0.1 * speed**2 + 0.001 * torque**2)
    speed = jnp.clip(speed + (15 * jnp.sin(angle) + 3 * torque) * 0.05, -8, 8)
    return jnp.stack([angle + speed * 0.05, speed, count + 1]), reward, jnp.array(False)


def reset_cartpole(key: Array) -> Array:
    return jnp.append(jax.random.uniform(key, (4,), minval=-0.05, maxval=0.05), 0.0)


def step_cartpole(state: Array, action: Array) -> tuple[Array, Array, Array]:
    x, speed, angle, turning, count = state
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    push = (jnp.where(action == 1, 10.0, -10.0) + 0.05 * turning**2 * sin) / 1.1
    turn = (9.8 * sin - cos * push) / (0.5 * (4 / 3 - 0.1 * cos**2 / 1.1))
    new = [x + 0.02 * speed, speed + 0.02 * (push - 0.05 * turn * cos / 1.1)]
    new += [angle + 0.02 * turning, turning + 0.02 * turn, count + 1]
    return jnp.stack(new), jnp.array(1.0), (jnp.abs(new[0]) > 2.4) | (jnp.abs(new[2]) > 0.2095)


TASKS = {
    "pendulum": Task(
        reset_pendulum,
        lambda s: jnp.stack([jnp.cos(s[0]), jnp.sin(s[0]), s[1]]),
        *(step_pendulum, 3, 1, True, 200),
    ),
    "cartpole": Task(reset_cartpole, lambda s: s[:4], step_cartpole, 4, 2, False, 500),
}


def mlp(layers: list[tuple[Array, Array]], x: Array) -> Array:
    *hidden, (weight, bias) = layers
    for w, b in hidden:
        x = jnp.tanh(x @ w + b)
    return x @ weight + bias


def make_parameters(task: Task, key: Array) -> dict[str, Any]:
    """Orthogonal: gain sqrt(2), 0.01 for the policy's last layer, 1 for the value's."""
    keys, found = iter(jax.random.split(key, 6)), {}
    for name, last, gain in (("policy", task.actions, 0.01), ("value", 1, 1.0)):
        shapes = ((task.inputs, WIDTH, 2**0.5), (WIDTH, WIDTH, 2**0.5), (WIDTH, last, gain))
        found[name] = [
            (jax.nn.initializers.orthogonal(g)(next(keys), (i, o)), jnp.zeros(o))
            for i, o, g in shapes
        ]
    return {**found, "log_std": jnp.zeros(task.actions)}


def log_prob(task: Task, p: dict[str, Any], x: Array, action: Array) -> Array:
    """Nats [...], of a Gaussian action or of a logit's index."""
    out = mlp(p["policy"], x)
    if task.continuous:
        z = (action - out) * jnp.exp(-p["log_std"])
        return -(0.5 * z**2 + p["log_std"] + 0.5 * jnp.log(2 * jnp.pi)).sum(-1)
    return jnp.take_along_axis(jax.nn.log_softmax(out), action[..., None], -1)[..., 0]


def make_iteration(args: argparse.Namespace) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    """Return the start's state, and the compiled iteration: state -> (state, mean reward)."""
    task, frames = TASKS[args.env], args.n * args.t
    adam = optax.chain(optax.clip_by_global_norm(MAX_NORM), optax.adam(args.lr, eps=EPS))

    def start() -> Any:
        key, *keys = jax.random.split(jax.random.PRNGKey(args.seed), args.n + 2)
        p = make_parameters(task, keys[0])
        moments = jnp.zeros(task.inputs), jnp.ones(task.inputs), jnp.array(1e-4)
        return p, adam.init(p), jax.vmap(task.reset)(jnp.stack(keys[1:])), moments, key

    def loss(p: Any, x: Array, action: Array, old: Array, advantage: Array, target: Array) -> Array:
        ratio = jnp.exp(log_prob(task, p, x, action) - old)
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        gain = jnp.minimum(ratio * advantage, jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * advantage)
        return 0.5 * ((mlp(p["value"], x)[..., 0] - target) ** 2).mean() - gain.mean()

    def iteration(carry: Any) -> Any:
        p, state, sims, (mean, var, count), key = carry

        def seen(sims: Array) -> Array:
            raw = jax.vmap(task.observe)(sims)
            return jnp.clip((raw - mean) / jnp.sqrt(var + 1e-8), -10, 10)

        def step(carry: Any, _: None) -> Any:
            sims, key = carry
            key, to_act, to_reset = jax.random.split(key, 3)
            x = seen(sims)
            out = mlp(p["policy"], x)
            noise = jnp.exp(p["log_std"]) * jax.random.normal(to_act, out.shape)
            action = out + noise if task.continuous else jax.random.categorical(to_act, out)
            after, reward, ended = jax.vmap(task.step)(sims, action)
            over = ended | (after[:, -1] >= task.limit)
            fresh = jax.vmap(task.reset)(jax.random.split(to_reset, args.n))
            values = (mlp(p["value"], each)[..., 0] for each in (x, seen(after)))
            row = (x, action, log_prob(task, p, x, action), reward, ended, over, *values)
            raw = jax.vmap(task.observe)(sims)
            return (jnp.where(over[:, None], fresh, after), key), (row, raw)

        (sims, key), (row, raw) = jax.lax.scan(step, (sims, key), None, args.t)
        x, action, old, reward, ended, over, value, value_after = row
        delta = reward + args.gamma * value_after * ~ended - value

        def back(running: Array, at: tuple[Array, Array]) -> tuple[Array, Array]:
            running = at[0] + args.gamma * args.lmbda * ~at[1] * running
            return running, running

        advantage = jax.lax.scan(back, jnp.zeros(args.n), (delta, over), reverse=True)[1]
        rows = (x, action, old, advantage, advantage + value)
        flat = tuple(each.reshape(frames, *each.shape[2:]) for each in rows)

        def epoch(carry: Any, key: Array) -> Any:
            order = jax.random.permutation(key, frames)
            parts = (e[order].reshape(args.minibatches, -1, *e.shape[1:]) for e in flat)
            return jax.lax.scan(update, carry, tuple(parts))

        def update(carry: Any, minibatch: Any) -> Any:
            p, state = carry
            change, state = adam.update(jax.grad(loss)(p, *minibatch), state, p)
            return (optax.apply_updates(p, change), state), None

        key, *keys = jax.random.split(key, args.epochs + 1)
        (p, state), _ = jax.lax.scan(epoch, (p, state), jnp.stack(keys))
        raw, total = raw.reshape(frames, -1), count + frames  # Chan et al. 1979
        shift = raw.mean(0) - mean
        var = (var * count + raw.var(0) * frames + shift**2 * count * frames / total) / total
        moments = mean + shift * frames / total, var, total
        return (p, state, sims, moments, key), reward.mean()

    return start, jax.jit(iteration, donate_argnums=0)


def main() -> None:
    clock = Clock()
    args = make_parser(__doc__).parse_args()
    if args.env not in TASKS:
        raise SystemExit(f"--env {args.env}: JAX has {' and '.join(TASKS)}")
    start, iteration = make_iteration(args)
    carry = jax.block_until_ready(jax.jit(start)())
    clock.start()
    for _ in range(args.iterations):
        carry, reward = iteration(carry)
        reached = float(reward)  # waits
        clock.lap()
    report("JAX", args, clock, packages=PACKAGES, reward=round(reached, 3))


if __name__ == "__main__":
    main()
