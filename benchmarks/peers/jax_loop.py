"""PPO in JAX, the environment included: rollout, GAE and update are one compiled function.

It is written in PureJaxRL's way (arXiv:2210.05639), with observations normalised, but without KL
or rows: what a simulator that can be compiled allows. In an environment of its own: make bench-jax.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false"

import jax
import jax.numpy as jnp
import optax
from jax import Array

from benchmarks.peers.common import Clock, make_parser, report

WIDTH, CLIP, MAX_NORM, EPS = 64, 0.2, 0.5, 1e-5


INPUTS, ACTIONS, LIMIT = 3, 1, 200  # Pendulum-v1


def reset(key: Array) -> Array:
    """Angle, speed, steps of the episode."""
    high = jnp.array([jnp.pi, 1.0])
    return jnp.append(jax.random.uniform(key, (2,), minval=-high, maxval=high), 0.0)


def observe(state: Array) -> Array:
    return jnp.stack([jnp.cos(state[0]), jnp.sin(state[0]), state[1]])


def simulate(state: Array, action: Array) -> tuple[Array, Array]:
    """Return the next state and the reward."""
    angle, speed, count = state
    torque = jnp.clip(action[0], -2, 2)
    wrapped = (angle + jnp.pi) % (2 * jnp.pi) - jnp.pi
    reward = -(wrapped**2 + 0.1 * speed**2 + 0.001 * torque**2)
    speed = jnp.clip(speed + (15 * jnp.sin(angle) + 3 * torque) * 0.05, -8, 8)
    return jnp.stack([angle + speed * 0.05, speed, count + 1]), reward


def mlp(layers: list[tuple[Array, Array]], x: Array) -> Array:
    *hidden, (weight, bias) = layers
    for w, b in hidden:
        x = jnp.tanh(x @ w + b)
    return x @ weight + bias


def make_parameters(key: Array) -> dict[str, Any]:
    """Orthogonal: gain sqrt(2), 0.01 for the policy's last layer, 1 for the value's."""
    keys, found = iter(jax.random.split(key, 6)), {}
    for name, last, gain in (("policy", ACTIONS, 0.01), ("value", 1, 1.0)):
        shapes = ((INPUTS, WIDTH, 2**0.5), (WIDTH, WIDTH, 2**0.5), (WIDTH, last, gain))
        found[name] = [
            (jax.nn.initializers.orthogonal(g)(next(keys), (i, o)), jnp.zeros(o))
            for i, o, g in shapes
        ]
    return {**found, "log_std": jnp.zeros(ACTIONS)}


def log_prob(p: dict[str, Any], x: Array, action: Array) -> Array:
    """Nats [...]."""
    z = (action - mlp(p["policy"], x)) * jnp.exp(-p["log_std"])
    return -(0.5 * z**2 + p["log_std"] + 0.5 * jnp.log(2 * jnp.pi)).sum(-1)


def make_learning(adam: Any, frames: int, minibatches: int) -> Callable[..., Any]:
    """Return the clipped updates: parameters, moments, rows, a key per epoch -> the first two."""

    def loss(p: Any, x: Array, action: Array, old: Array, advantage: Array, target: Array) -> Array:
        ratio = jnp.exp(log_prob(p, x, action) - old)
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        gain = jnp.minimum(ratio * advantage, jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * advantage)
        return 0.5 * ((mlp(p["value"], x)[..., 0] - target) ** 2).mean() - gain.mean()

    def update(carry: Any, minibatch: Any) -> Any:
        p, state = carry
        change, state = adam.update(jax.grad(loss)(p, *minibatch), state, p)
        return (optax.apply_updates(p, change), state), None

    def learn(p: Any, state: Any, flat: tuple[Array, ...], keys: Array) -> Any:
        def epoch(carry: Any, key: Array) -> Any:
            order = jax.random.permutation(key, frames)
            parts = (e[order].reshape(minibatches, -1, *e.shape[1:]) for e in flat)
            return jax.lax.scan(update, carry, tuple(parts))

        return jax.lax.scan(epoch, (p, state), keys)[0]

    return learn


def make_iteration(args: argparse.Namespace) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    """Return the start's state, and the compiled iteration: state -> (state, mean reward)."""
    frames = args.n * args.t
    adam = optax.chain(optax.clip_by_global_norm(MAX_NORM), optax.adam(args.lr, eps=EPS))
    learn = make_learning(adam, frames, args.minibatches)

    def start() -> Any:
        key, *keys = jax.random.split(jax.random.PRNGKey(args.seed), args.n + 2)
        p = make_parameters(keys[0])
        moments = jnp.zeros(INPUTS), jnp.ones(INPUTS), jnp.array(1e-4)
        return p, adam.init(p), jax.vmap(reset)(jnp.stack(keys[1:])), moments, key

    def iteration(carry: Any) -> Any:
        p, state, sims, (mean, var, count), key = carry

        def seen(sims: Array) -> Array:
            raw = jax.vmap(observe)(sims)
            return jnp.clip((raw - mean) / jnp.sqrt(var + 1e-8), -10, 10)

        def step(carry: Any, _: None) -> Any:
            sims, key = carry
            key, to_act, to_reset = jax.random.split(key, 3)
            x = seen(sims)
            out = mlp(p["policy"], x)
            action = out + jnp.exp(p["log_std"]) * jax.random.normal(to_act, out.shape)
            after, reward = jax.vmap(simulate)(sims, action)
            over = after[:, -1] >= LIMIT
            fresh = jax.vmap(reset)(jax.random.split(to_reset, args.n))
            values = (mlp(p["value"], each)[..., 0] for each in (x, seen(after)))
            row = (x, action, log_prob(p, x, action), reward, over, *values)
            raw = jax.vmap(observe)(sims)
            return (jnp.where(over[:, None], fresh, after), key), (row, raw)

        (sims, key), (row, raw) = jax.lax.scan(step, (sims, key), None, args.t)
        x, action, old, reward, over, value, value_after = row
        delta = reward + args.gamma * value_after - value

        def back(running: Array, at: tuple[Array, Array]) -> tuple[Array, Array]:
            running = at[0] + args.gamma * args.lmbda * ~at[1] * running
            return running, running

        advantage = jax.lax.scan(back, jnp.zeros(args.n), (delta, over), reverse=True)[1]
        rows = (x, action, old, advantage, advantage + value)
        flat = tuple(each.reshape(frames, *each.shape[2:]) for each in rows)

        key, *keys = jax.random.split(key, args.epochs + 1)
        p, state = learn(p, state, flat, jnp.stack(keys))
        raw, total = raw.reshape(frames, -1), count + frames  # Chan et al. 1979
        shift = raw.mean(0) - mean
        var = (var * count + raw.var(0) * frames + shift**2 * count * frames / total) / total
        moments = mean + shift * frames / total, var, total
        return (p, state, sims, moments, key), reward.mean()

    return start, jax.jit(iteration, donate_argnums=0)


def main() -> None:
    clock = Clock()
    args = make_parser(__doc__).parse_args()
    if args.env != "pendulum":
        raise SystemExit(f"--env {args.env}: JAX has pendulum alone")
    start, iteration = make_iteration(args)
    carry = jax.block_until_ready(jax.jit(start)())
    clock.start()
    for _ in range(args.iterations):
        carry, reward = iteration(carry)
        reached = float(reward)  # waits
        clock.lap()
    report(
        "JAX", args, clock, packages=("jax", "jaxlib", "optax", "numpy"), reward=round(reached, 3)
    )


if __name__ == "__main__":
    main()
