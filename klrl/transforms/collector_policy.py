"""``gen_model="from_collector"``: the policy is read from the collector at the first step."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torchrl.envs import Transform

from klrl.kl.policies import Key
from klrl.transforms import language as _language
from klrl.transforms.retrieve import RetrieveLogProb


class CollectorPolicy:
    """The policy of the collector that runs an environment, set up to score.

    Args:
        ref_model: the reference; its input mode and padding are used for the policy too.
        key: where the policy's log-probs go.
    """

    def __init__(self, ref_model: Any, key: Key) -> None:
        self.ref_model, self.key = ref_model, key
        self.model: Any = None
        self._collector: Callable[[], Any] = lambda: None

    def __getstate__(self) -> dict[str, Any]:
        return {"ref_model": self.ref_model, "key": self.key}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def resolve(self, transform: Transform) -> Any:
        """The collector's policy as a scoring model; it shares the live weights.

        Raises:
            ValueError: the transform is in no environment, or no collector runs it.
        """
        try:
            container = transform.container
        except ValueError:  # what TorchRL raises for a part of a Compose without environment
            container = None
        if container is None:
            raise ValueError(
                "gen_model='from_collector', but the transform is in no environment: append it to "
                "the environment of a collector, or give gen_model"
            )
        collector = container.collector
        if collector is None:
            raise ValueError(
                "gen_model='from_collector', but no collector runs this environment (or it runs in "
                "another process): give gen_model or gen_model_factory"
            )
        if self._collector() is not collector:
            self.model = self._scoring(collector.policy)
            self._collector = weakref.ref(collector)
        return self.model

    def _scoring(self, policy: Any) -> Any:
        ref = self.ref_model
        if not _language.is_wrapper(ref):
            return policy
        if not hasattr(policy, "get_new_version"):
            raise ValueError(
                f"gen_model='from_collector': the collector's policy {type(policy).__name__} is no "
                "LLM wrapper; give gen_model"
            )
        # Copies: TorchRL's get_new_version writes into the policy's own tokenizer_kwargs.
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


class PolicyLogProb(RetrieveLogProb):
    """Scores with the collector's policy, read at the first step."""

    def __init__(self, model: Any, *, source: CollectorPolicy, **kwargs: Any) -> None:
        super().__init__(model, **kwargs)
        self.source, self.model = source, None

    def scorer(self) -> Any:
        """The collector's policy, with its live weights."""
        return self.source.resolve(self)


class ReferenceLogProb(RetrieveLogProb):
    """Scores with the reference, at the temperature of the collector's policy."""

    def __init__(self, model: Any, *, source: CollectorPolicy, **kwargs: Any) -> None:
        super().__init__(model, **kwargs)
        self.source = source

    def sampling_temperature(self) -> float:
        """The ``temperature`` argument, else that of the collector's policy."""
        if self.temperature is not None:
            return self.temperature
        return _language.temperature_of(self.source.model)
