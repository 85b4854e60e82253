"""RetrieveKL: scores the data with two models and charges their KL, in one transform.

RetrieveLogProb(gen_model) -> RetrieveLogProb(ref_model) -> KLComputation.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from tensordict.nn import TensorDictModuleBase
from torchrl.envs import Transform

from klrl.envs.llm.transforms.kl import wrappers as _language
from klrl.envs.llm.transforms.kl.computation import KLComputation
from klrl.envs.llm.transforms.kl.retrieve import RetrieveLogProb
from klrl.envs.llm.transforms.kl.served import Served
from klrl.envs.transforms.base import OneTransform, taking_arguments_of
from klrl.kl.policies import Key, is_wrapper
from klrl.kl.reference import FrozenPolicy

#: The value of ``gen_model`` that selects the policy of the environment's collector.
FROM_COLLECTOR = "from_collector"
#: An LLM wrapper, a control actor, :data:`FROM_COLLECTOR`, or None if a factory makes the model.
Model: TypeAlias = TensorDictModuleBase | str | None

#: Arguments that RetrieveKL passes to KLComputation.
_CHARGING = frozenset(inspect.signature(KLComputation).parameters) - {"per_token"}
#: Arguments that RetrieveKL passes to KLComputation and to RetrieveLogProb.
_OF_ALL = {"padding_side", "reward_key"}


@taking_arguments_of(
    KLComputation, RetrieveLogProb, without=("per_token", "model", "log_probs_full_key")
)
class RetrieveKL(OneTransform):
    """Scores the data with a policy and a reference, and charges their KL to the reward.

    The models are two LLM wrappers, or two control actors. Both score the same actions or tokens.
    LLM wrappers score at the same temperature, by default the policy's.

    Args:
        gen_model: the policy (an LLM wrapper: with ``generate=False``); or "from_collector": the
            collector's policy, found at the first step, with its live weights.
        ref_model: the reference (an LLM wrapper: with ``generate=False``).
        gen_model_factory: makes ``gen_model``; give either a model or a factory.
        ref_model_factory: makes ``ref_model``; give either a model or a factory.
        history_key: key of the conversation, read in place of the models' input keys; with the
            default "history", each model reads its own input key.
        use_ray_service: older spelling of ``service_backend="ray"``.
        service_backend: "ray" makes a :class:`RayRetrieveKL`, which also takes
            ``num_cpus``, ``num_gpus`` and ``actor_name``; "direct", or None without
            ``use_ray_service``, runs in this process.
        **kwargs: arguments of :class:`~klrl.kl.KLComputation` (``gen_log_probs_full_key``,
            ``ref_log_probs_full_key``, ``kl_key``, ``add_to_reward``, ``coef``, ``coeff``,
            ``estimator``, ``raw_reward_key``), of :class:`~klrl.kl.RetrieveLogProb`
            (``assistant_only``, ``tokenizer_kwargs``, ``detach``, ``device``, ``tokenizer``,
            ``temperature``), or of both (``padding_side``, ``reward_key``).

    Raises:
        ValueError: neither or both of a model and its factory; ``generate=True``; models with
            different ``pad_output`` or the same ``log_probs_key``; ``gen_log_probs_full_key`` equal
            to ``ref_log_probs_full_key``; no collector at the first step.
        TypeError: an unknown argument.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Transform:
        """Build the Ray-backed class if the arguments choose Ray."""
        if wants_ray(kwargs):
            return RayRetrieveKL(*args, **kwargs)
        return super().__new__(cls)

    def __init__(
        self,
        gen_model: Model = FROM_COLLECTOR,
        ref_model: Model = None,
        *,
        gen_model_factory: Callable[[], TensorDictModuleBase] | None = None,
        ref_model_factory: Callable[[], TensorDictModuleBase] | None = None,
        history_key: Key = "history",
        use_ray_service: bool = False,
        service_backend: str | None = None,
        **kwargs: Any,
    ) -> None:
        computation = KLComputation(**{name: kwargs[name] for name in _CHARGING & kwargs.keys()})
        gen_model = one_of("gen_model", gen_model, gen_model_factory, default=FROM_COLLECTOR)
        ref_model = FrozenPolicy.shared(one_of("ref_model", ref_model, ref_model_factory))
        scoring = {
            "history_key": None if history_key == "history" else history_key,
            **{k: v for k, v in kwargs.items() if k in _OF_ALL or k not in _CHARGING},
        }
        keys = {
            "gen": computation.gen_log_probs_full_key,
            "ref": computation.ref_log_probs_full_key,
        }
        super().__init__(*_parts(gen_model, ref_model, keys, scoring), computation)

    @property
    def computation(self) -> KLComputation:
        """The part that charges the KL and stores the coefficient."""
        return self.part(KLComputation)


def wants_ray(arguments: Mapping[str, object]) -> bool:
    """Whether a constructor's arguments choose Ray."""
    use_ray, backend = arguments.get("use_ray_service", False), arguments.get("service_backend")
    if backend not in (None, "direct", "ray"):
        raise ValueError(f"service_backend={backend!r}: choose 'ray' or 'direct'")
    if use_ray and backend == "direct":
        raise ValueError("use_ray_service=True contradicts service_backend='direct'")
    return bool(use_ray) or backend == "ray"


def one_of(
    name: str,
    model: Model,
    factory: Callable[[], TensorDictModuleBase] | None,
    default: str | None = None,
) -> TensorDictModuleBase:
    """Return the given model, or call the factory; exactly one of the two must be given."""
    check_one_of(name, model, factory, default)
    return model if factory is None else factory()


def check_one_of(name: str, model: Model, factory: object, default: str | None = None) -> None:
    """Require a model or its factory, but not both."""
    if factory is not None and model is not None and model is not default:
        raise ValueError(f"both {name} and {name}_factory are given: choose one")
    if factory is None and model is None:
        raise ValueError(f"neither {name} nor {name}_factory is given")


def _parts(
    gen: Model, ref: TensorDictModuleBase, keys: dict[str, Key], shared: dict[str, Any]
) -> tuple[RetrieveLogProb, RetrieveLogProb]:
    if isinstance(gen, str) and gen == FROM_COLLECTOR:
        how = {"source": CollectorPolicy(ref, keys["gen"]), **shared}
        return (
            FromCollector(ref, live=True, log_probs_full_key=keys["gen"], **how),
            FromCollector(ref, live=False, log_probs_full_key=keys["ref"], **how),
        )
    _check_pair(gen, ref, shared.get("assistant_only", True))
    if is_wrapper(gen) and shared.get("temperature") is None:
        shared = {**shared, "temperature": _language.temperature_of(gen)}
    return (
        RetrieveLogProb(gen, log_probs_full_key=keys["gen"], **shared),
        RetrieveLogProb(ref, log_probs_full_key=keys["ref"], **shared),
    )


def _check_pair(gen: TensorDictModuleBase, ref: TensorDictModuleBase, assistant_only: bool) -> None:
    kinds = [is_wrapper(model) for model in (gen, ref)]
    if kinds[0] != kinds[1]:
        raise ValueError(
            f"gen_model={type(gen).__name__}, ref_model={type(ref).__name__}: "
            "give two LLM wrappers or two control actors"
        )
    if not kinds[0]:
        return
    for name, model in (("gen_model", gen), ("ref_model", ref)):
        _language.check_wrapper(model, name, assistant_only)
    if gen.pad_output != ref.pad_output:
        raise ValueError(
            f"pad_output mismatch: gen_model.pad_output={gen.pad_output}, "
            f"ref_model.pad_output={ref.pad_output}; give both the same value"
        )
    if gen.log_probs_key == ref.log_probs_key:
        raise ValueError(
            f"gen_model and ref_model share log_probs_key={gen.log_probs_key!r}: give two keys"
        )


class CollectorPolicy:
    """Finds the policy of an environment's collector, and turns it into a scoring model."""

    def __init__(self, ref_model: TensorDictModuleBase, key: Key) -> None:
        self.ref_model, self.key = ref_model, key
        self.model: TensorDictModuleBase | None = None
        self._collector: Callable[[], object] = lambda: None

    def __getstate__(self) -> dict[str, object]:
        return {"ref_model": self.ref_model, "key": self.key}

    def __setstate__(self, state: Mapping[str, object]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def resolve(self, transform: Transform) -> TensorDictModuleBase:
        """Return the collector's policy as a scoring model, which shares the live weights."""
        try:
            container = transform.container
        except ValueError:  # raised by TorchRL in a Compose without environment
            container = None
        if container is None:
            raise ValueError(
                "gen_model='from_collector', but the transform has no environment: append it to "
                "the environment of a collector, or give gen_model"
            )
        collector = container.collector
        if collector is None:
            raise ValueError(
                "gen_model='from_collector', but no collector runs this environment (or it runs in "
                "a different process): give gen_model or gen_model_factory"
            )
        if self._collector() is not collector:
            self.model = self._scoring(collector.policy)
            self._collector = weakref.ref(collector)
        return self.model

    def _scoring(self, policy: TensorDictModuleBase) -> TensorDictModuleBase:
        ref = self.ref_model
        if not is_wrapper(ref):
            if not hasattr(policy, "get_dist"):
                raise TypeError(
                    f"gen_model='from_collector': the collector's policy {type(policy).__name__} "
                    "has no get_dist (is it wrapped with an exploration module?); give gen_model"
                )
            return policy
        if not hasattr(policy, "get_new_version"):
            raise ValueError(
                f"gen_model='from_collector': the collector's policy {type(policy).__name__} is "
                "not an LLM wrapper; give gen_model"
            )
        # Pass copies: TorchRL's get_new_version would change the policy's own tokenizer_kwargs.
        generate_kwargs = dict(getattr(policy, "generate_kwargs", None) or {})
        generate_kwargs.pop("num_return_sequences", None)
        prefix = self.key[:-1]
        return policy.get_new_version(
            generate=False,
            return_log_probs=True,
            log_probs_key=prefix[0] if len(prefix) == 1 else prefix,
            input_mode=ref.input_mode,
            input_key=ref.in_keys[0],
            pad_output=ref.pad_output,
            tokenizer_kwargs=dict(getattr(policy, "tokenizer_kwargs", None) or {}),
            generate_kwargs=generate_kwargs,
            num_samples=None,
            inplace=None,
        )


class FromCollector(RetrieveLogProb):
    """Scores with the collector's policy (``live``) or the reference, at the same temperature."""

    def __init__(
        self, model: TensorDictModuleBase, *, source: CollectorPolicy, live: bool, **kwargs: Any
    ) -> None:
        super().__init__(model, **kwargs)
        self.source = source
        if live:
            self.model = None

    def scorer(self) -> TensorDictModuleBase:
        """Return the collector's policy with its live weights, or the reference."""
        return self.source.resolve(self) if self.model is None else self.model

    def sampling_temperature(self) -> float:
        """Return the argument ``temperature``, else the temperature of the collector's policy."""
        if self.temperature is not None:
            return self.temperature
        policy = self.scorer() if self.model is None else self.source.model
        return _language.temperature_of(policy)


@taking_arguments_of(Served, RetrieveKL, without=("build", "arguments", "more"))
class RayRetrieveKL(Served):
    """:class:`RetrieveKL` with both models in a Ray actor.

    Args:
        gen_model: the policy; the Ray actor gets a copy, which does not follow later updates.
        ref_model: the reference; the Ray actor gets a copy.
        **kwargs: arguments of RetrieveKL (factories run in the Ray actor, and ``device`` is one of
            its devices; results return to the data's device); and arguments of the Ray actor:
            ``num_cpus`` (default 1), ``num_gpus``, ``actor_name`` (an existing one is reused).

    Raises:
        ValueError: neither or both of a model and its factory; "from_collector", since that policy
            is in a different process; ``detach=False``. An error that a step raises in the Ray
            actor keeps its type.
        ImportError: Ray is not installed.
    """

    def __init__(
        self, gen_model: Model = FROM_COLLECTOR, ref_model: Model = None, **kwargs: Any
    ) -> None:
        factory = kwargs.get("gen_model_factory")
        check_one_of("gen_model", gen_model, factory, default=FROM_COLLECTOR)
        check_one_of("ref_model", ref_model, kwargs.get("ref_model_factory"))
        if factory is not None:
            gen_model = None
        elif isinstance(gen_model, str) and gen_model == FROM_COLLECTOR:
            raise ValueError(
                "gen_model='from_collector' with Ray: the collector's policy is in a different "
                "process; give gen_model or gen_model_factory"
            )
        super().__init__(RetrieveKL, {"gen_model": gen_model, "ref_model": ref_model}, **kwargs)
