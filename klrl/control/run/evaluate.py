"""Evaluate a control policy by episodes in copies of the environment, stepped together."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torch.special import ndtr

from klrl.base.errors import ConfigError, EnvError, in_one_line
from klrl.base.files import replacing
from klrl.base.seeds import Stream, derived_seed
from klrl.base.text import warn
from klrl.config import Config, CustomEnvConfig, EnvConfig
from klrl.config.placement import MOST_JOINT
from klrl.control.env.copies import VectorGymEnv, make_copies, transformed
from klrl.control.env.simulators import Array, Native, native, on_host
from klrl.control.policy.acting import Acting, make_acting
from klrl.control.policy.distributions import Family, MultiCategorical, Params
from klrl.control.policy.networks import Agent, PolicyNet
from klrl.control.run.load import load_parties, trained_agent, trained_reference
from klrl.control.run.rollout import VectorRollout
from klrl.domains import CONTROL
from klrl.kl.divergences import MEASURED, js_draws
from klrl.runs.video import Camera, Film
from klrl.train.policy_kl import Parties
from klrl.train.schedule import USUAL_STEPS
from klrl.train.scores import REFERENCE_KLS, Evaluation, EvaluationPlan, Scores, evaluation

#: Without a TimeLimit, some episodes never end. An episode is cut off after this many steps at the
#: latest, and then has no score.
MAX_STEPS = 10_000
MAX_COPIES = 100
#: Noise is drawn for this many steps at a time.
_NOISE_STEPS = 250


def evaluate_policy(
    agent: Agent, config: EnvConfig, plan: EvaluationPlan, reference: PolicyNet | None = None
) -> Evaluation:
    """Play episodes in fresh copies of the environment, one from each start state.

    If ``plan`` limits the steps, no more episodes start together than can end within the limit.
    Sampling does not change torch's global generator. With a ``reference``, KL(policy||reference)
    and KL(reference||policy) are measured in every state of the episodes.
    """
    measure = None
    if reference is not None:
        measure = measure_of(agent.family, agent.policy_net, reference, REFERENCE_KLS)
    scores = waves(agent, config, plan, measure)
    return evaluation(scores, CONTROL, "sampled" if plan.sampled else CONTROL.mode, plan.starts)


def waves(
    agent: Agent, config: EnvConfig, plan: EvaluationPlan, measure: Measure | None
) -> Iterator[Scores]:
    """Play episodes in waves of copies; yield each wave's scores and measured divergences."""
    (episodes, left), starts = plan.size, plan.starts
    copies = min(episodes, MAX_COPIES)
    if not copies:
        return
    env = make_copies(config, seed=0, num_envs=copies, device=str(plan.device))
    copies = env.num_copies
    longest, seeds, noise = env.simulators.longest_episode, starts.seeds(episodes), None
    if plan.sampled:
        noise = Stream(derived_seed(starts.seed, f"{starts.use}, actions"))
    try:
        while seeds:
            wave, limit = _wave(min(len(seeds), copies), left, longest)
            if not wave:
                break
            # Without noise it takes the mode.
            acting = make_acting(agent, plan.device, env.simulators.device)
            watched = None if measure is None else Measuring(acting, measure, plan.device)
            scores, steps = play(env, watched or acting, seeds[:wave], limit, noise)
            yield scores if watched is None else scores._replace(kls=watched.episodes(steps))
            seeds = seeds[wave:]
            left = None if left is None else left - sum(steps)
    finally:
        env.close()


def _wave(episodes: int, left: int | None, longest: int | None) -> tuple[int, int]:
    """Return how many episodes start together, and after how many steps each is cut off."""
    if left is not None:
        episodes = min(episodes, left // (longest or USUAL_STEPS))
    if longest is not None:
        return episodes, longest
    return episodes, MAX_STEPS if left is None else min(MAX_STEPS, left // max(episodes, 1))


def play(
    env: VectorGymEnv,
    acting: Acting,
    seeds: Sequence[int],
    limit: int,
    noise: Stream | None,
    watch: Callable[[], None] = lambda: None,
) -> tuple[Scores, list[int]]:
    """Play one episode per seed, in the first ``len(seeds)`` copies; return scores and lengths.

    Actions are deterministic without ``noise``. ``watch`` is called in every state, also the last.
    Simulators that only step together begin further episodes, which count for nothing.
    """
    some = env.simulators.masks
    playing = np.arange(env.num_copies) < len(seeds)
    ended, total = np.zeros_like(playing), np.zeros(env.num_copies)
    steps = np.zeros(env.num_copies, int)
    padded = [*seeds, *[0] * (env.num_copies - len(seeds))]
    observation = env.reset_native(playing if some else None, padded)
    watch()
    for step in range(limit):
        if noise is not None and step % _NOISE_STEPS == 0:
            with noise.drawing():  # families draw from torch's global generator
                acting.begin(_NOISE_STEPS, env.num_copies)
        seen = native(env.observed(observation, "in an evaluation"))
        action = acting.action(acting.sample(step % _NOISE_STEPS, seen))
        results = env.step_native(action, playing if some else None)
        observation, reward, terminated, truncated = results
        total[playing] += env.finite("reward", reward, "in an evaluation").cpu().numpy()[playing]
        steps += playing
        watch()
        over = on_host(terminated | truncated)
        done = playing & over
        ended |= done
        playing &= ~done
        if not playing.any():
            break
        if not some and over.any():
            observation = env.reset_native(over)
    return Scores(total[ended].tolist(), cut=int(playing.sum())), steps[: len(seeds)].tolist()


def evaluate_trained(folder: Path, config: Config, plan: EvaluationPlan, which: str) -> Evaluation:
    """Evaluate a stored policy in ``config.env``; see :func:`klrl.train.evaluate.evaluate_run`."""
    agent, reference = trained_agent(folder, which, str(plan.device)), None
    if config.has_reference:
        reference = trained_reference(folder, which, str(plan.device)).policy_net
    return evaluate_policy(agent, config.env, plan, reference)


def longest_episode(config: Config) -> int | None:
    """Return the largest length of an episode; None if the environment declares no limit."""
    env = make_copies(config.env, seed=0, num_envs=1)
    env.close()
    return env.simulators.longest_episode


def distances(
    parties: Parties, config: Config, plan: EvaluationPlan
) -> tuple[Iterator[Scores], list[str]]:
    """Measure divergences of two stored policies, for :func:`klrl.train.policy_kl.kl_between`."""
    policy, other, player = load_parties(parties, config, plan.device)
    names, notes = measured_names(policy.family, policy.policy_net.outputs)
    measure = measure_of(policy.family, policy.policy_net, other.policy_net, names)
    return waves(player, config.env, plan, measure), notes


# ------------------------------------------------------------------------------------- divergences

#: Draws per state, from which js and tv of Gaussians with several dimensions are estimated.
DRAWS = 64
#: Number of stored states, and of numbers in them, at which :class:`Measuring` measures.
_STATES, _NUMBERS = 2**13, 2**20

#: Maps states [..., D] to {name of a divergence: values [...]}.
Measure = Callable[[Tensor], dict[str, Tensor]]


class Measuring:
    """A wrapper of a policy that measures divergences in the states where the policy acts."""

    def __init__(self, acting: Acting, measure: Measure, device: torch.device) -> None:
        self.begin, self.action, self._sample = acting.begin, acting.action, acting.sample
        self._measure, self._device = measure, device
        self._seen: list[Tensor] = []
        self._measured: list[dict[str, Array]] = []

    def sample(self, step: int, observation: Native) -> Native:
        """Store observations [N, D]; return the wrapped policy's sample."""
        self._seen.append(torch.as_tensor(observation).clone())
        count = len(self._seen)
        if count * len(observation) >= _STATES or count * self._seen[0].numel() >= _NUMBERS:
            self._flush()
        return self._sample(step, observation)

    def episodes(self, steps: Sequence[int]) -> list[dict[str, Array]]:
        """Return name -> values [T] for each episode; ``steps`` are the episodes' lengths."""
        self._flush()
        names = self._measured[0]
        table = {name: np.concatenate([part[name] for part in self._measured]) for name in names}
        return [{name: x[:count, i] for name, x in table.items()} for i, count in enumerate(steps)]

    def _flush(self) -> None:
        if self._seen:
            states = torch.stack(self._seen).to(self._device)
            found = self._measure(states)
            self._measured.append({name: value.cpu().numpy() for name, value in found.items()})
            self._seen = []


def measure_of(
    family: Family, policy: PolicyNet, other: PolicyNet, names: Sequence[str]
) -> Measure:
    """Make a function that measures divergences of two networks of one family, in float64."""

    @torch.no_grad()
    def measure(states: Tensor) -> dict[str, Tensor]:
        p, q = (
            dict(zip(family.param_keys, (x.double() for x in net(states)), strict=True))
            for net in (policy, other)
        )
        found = {}
        for name in names:
            noise = family.divergence_noise(name, p, DRAWS)
            if noise is not None and noise.shape[-1] == 1:
                found[name] = _on_a_line(name, p, q)
            else:
                found[name] = family.divergence(name, p, q, noise)
        return found

    return measure


def _on_a_line(name: str, p: Params, q: Params) -> Tensor:
    """Compute tv of one-dimensional Gaussians [..., 1] in closed form, or js by quadrature.

    With z = (x - mean of p) / scale of p, log p - log q = a z^2 + b z + c.
    """
    d, k = (q["loc"] - p["loc"]) / p["scale"], q["scale"] / p["scale"]
    a, b, c = (1 / k**2 - 1) / 2, -d / k**2, d**2 / (2 * k**2) + k.log()
    if name == "tv":  # |p(I) - q(I)|; I lies between the roots, where p = q; one may be infinite
        far = -(b + torch.copysign((b**2 - 4 * a * c).clamp(min=0).sqrt(), b)) / 2
        at_roots = [ndtr(z) - ndtr((z - d) / k) for z in (far / a, c / far)]
        return (at_roots[0] - at_roots[1]).nan_to_num().abs().squeeze(-1)  # nan if p = q
    z = torch.linspace(-12, 12, 1001, dtype=d.dtype, device=d.device)
    density = (-(z**2) / 2).softmax(0)
    log_ratios = (a * x**2 + b * x + c for x in (z, d + k * z))
    return (js_draws(*log_ratios) * density).sum(-1).clamp(min=0)


def measured_names(family: Family, outputs: int) -> tuple[Sequence[str], list[str]]:
    """Return the divergences to measure, and lines about estimated or omitted divergences."""
    if isinstance(family, MultiCategorical) and math.prod(family.counts) > MOST_JOINT:
        many = f"{math.prod(family.counts)} joint actions, more than {MOST_JOINT}"
        return MEASURED[:2], [f"js and tv are left out: {many}"]
    note = f"js and tv are estimated by {DRAWS} draws in each state: no closed form in {outputs}-D"
    return MEASURED, [note] * ("loc" in family.param_keys and outputs > 1)


# ------------------------------------------------------------------------------------------ film

#: The render mode in which Gymnasium returns one RGB picture.
_MODE = "rgb_array"


def film_trained(
    folder: Path, config: Config, plan: EvaluationPlan, which: str, camera: Camera
) -> Film:
    """Film one episode of a stored policy, from the first of the start states."""
    env, starts, noise = _drawn(config.env), plan.starts, None
    if plan.sampled:
        noise = Stream(derived_seed(starts.seed, f"{starts.use}, film"))
    try:
        agent = trained_agent(folder, which, str(plan.device))
        acting = make_acting(agent, plan.device, env.simulators.device)
        limit = env.simulators.longest_episode or MAX_STEPS
        warn(f"filming an episode of at most {limit:,} steps")
        camera.start(env.simulators.pictures_per_second)
        scores, steps = play(
            env, acting, starts.seeds(1), limit, noise, lambda: camera.take(env.picture())
        )
    finally:
        env.close()
    return Film(sum(steps), scores.returns[0] if scores.returns else None)


def _drawn(config: EnvConfig) -> VectorGymEnv:
    """Make an environment that renders; render it once as a check."""
    mode = {"render_mode": _MODE}
    # With a limit, each picture has its own thread, but OpenGL draws only in the first one's.
    config = replace(config, step_timeout=None)
    if isinstance(config, CustomEnvConfig):
        drawing: EnvConfig = replace(config, args={**config.args, **mode})
    else:
        drawing = replace(config, kwargs={**config.kwargs, **mode})
    env = None
    try:
        env = make_copies(drawing, seed=0, num_envs=1)
        env.reset_native()
        if env.num_copies > 1:
            raise EnvError("it is a batch, and a film shows one; let the function take num_envs")
        env.picture()
    except Exception as error:  # simulators and OpenGL may raise anything
        if env is not None:
            env.close()
        reason = str(error) if isinstance(error, EnvError) else in_one_line(error)
        raise ConfigError(
            f"--video: {config.id} cannot be rendered with render_mode={_MODE}: {reason}; see "
            "docs/runs.md, Videos"
        ) from error
    return env


# ------------------------------------------------------------------------------------ recording

#: Steps per rollout while recording.
_RECORDED_STEPS = 250


def record_trained(
    run: Path, config: Config, plan: EvaluationPlan, which: str, into: Path
) -> Evaluation:
    """Play a policy, and write all episodes that ended to the new folder ``into``.

    Returns:
        The evaluation of these episodes. If none ended, the folder is not made.
    """
    agent, episodes = trained_agent(run, which, str(plan.device)), list[TensorDictBase]()
    starts, size = plan.starts, plan.size
    flags = ("done", "terminated", "truncated")
    after = [("next", key) for key in ("observation", "reward", *flags)]
    keys = ("observation", "action", agent.family.sample_key, *flags, *after)

    def played() -> Iterator[Scores]:
        begun = 0
        while begun < size.episodes:
            count = min(MAX_COPIES, size.episodes - begun)
            seed = derived_seed(starts.seed, starts.use, begun)
            env = make_copies(config.env, seed=seed, num_envs=count)
            count = min(count, env.num_copies)
            begun += count
            rollout = VectorRollout(transformed(env), agent, _RECORDED_STEPS, plan.device)
            rollout.sampled = plan.sampled
            parts, returns = list[TensorDictBase](), list[float]()
            ended = (
                torch.arange(env.num_copies) >= count
            )  # a batch may have more copies than are needed
            while not ended.all() and len(parts) * _RECORDED_STEPS < MAX_STEPS:
                parts.append(rollout.collect().cpu())
                ended |= parts[-1]["next", "done"].any(1)[:, 0]
            rollout.close()
            for row in TensorDict.cat(parts, 1)[:count][ended[:count]]:
                frames = row[: int(row["next", "done"].int().argmax()) + 1]
                returns.append(float(frames["next", "episode_reward"][-1]))
                number = torch.full((len(frames),), len(episodes))
                episodes.append(frames.select(*keys).set("episode", number))
            yield Scores(returns, cut=count - len(returns))

    result = evaluation(played(), CONTROL, "sampled" if plan.sampled else CONTROL.mode, starts)
    if episodes:
        into.parent.mkdir(parents=True, exist_ok=True)
        with replacing(into) as partial:
            TensorDict.cat(episodes).memmap(partial)
    return result
