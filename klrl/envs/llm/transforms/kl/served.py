"""Runs a transform's models in a Ray actor, which several environments may share.

The transform in each environment declares keys and specs; the Ray actor runs the steps. Requires
``klrl[ray]``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tensordict import TensorDictBase
from torch import Tensor
from torchrl.envs import Compose, Transform

from klrl.base.ray_start import start_ray
from klrl.envs.transforms.base import OneTransform


class Service:
    """The Ray actor: runs a transform with its models."""

    def __init__(self, build: Callable[..., Transform], arguments: dict[str, object]) -> None:
        self.transform = transform = build(**arguments)
        self.parts = list(transform.transforms) if isinstance(transform, Compose) else [transform]
        self.out_keys = [key for part in self.parts for key in part.out_keys]

    def shells(self) -> list[Transform]:
        """Return the transform's parts without models and tokenizers, to declare keys and specs."""
        shells = [part.clone() for part in self.parts]
        for shell in shells:
            for name in ("model", "ref_model", "tokenizer"):
                if hasattr(shell, name):
                    setattr(shell, name, None)
        return shells

    def step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        """Run a step of the transform; return the entries for "next"."""
        written = next_tensordict.copy()
        self.transform._step(tensordict, written)
        return written.select(*self.out_keys, strict=False)

    def coefficient(self, value: float | None = None) -> float:
        """Set the coefficient if a value is given; return it."""
        if value is not None:
            self.transform.coef = value
        return float(self.transform.coef)


class Served(OneTransform):
    """A transform whose models are in a Ray actor.

    The parts in this process have no models. Transforms that are appended to this Compose run in
    this process. The Ray actor lives until no transform uses it. An existing Ray actor of the same
    ``actor_name`` is reused, even if its arguments differ.
    """

    def __init__(
        self,
        build: Callable[..., Transform],
        arguments: dict[str, object],
        *,
        num_cpus: float | None = None,
        num_gpus: float = 0,
        actor_name: str | None = None,
        use_ray_service: bool = True,  # ignored, as is service_backend
        service_backend: str | None = "ray",
        **more: object,
    ) -> None:
        arguments = arguments | more
        if not arguments.get("detach", True):
            raise ValueError("detach=False: a Ray actor returns no gradient; set detach=True")
        cpus = 1 if num_cpus is None else num_cpus
        options: dict[str, object] = {"num_cpus": cpus, "num_gpus": num_gpus}
        if actor_name is not None:
            options |= {"name": actor_name, "get_if_exists": True}
        ray = start_ray()
        actor = ray.remote(Service).options(**options).remote(build, arguments)
        shells = ray.get(actor.shells.remote())
        for shell in shells:
            shell.is_shell = True
        super().__init__(*shells)
        self._actor, self._actor_name = actor, actor_name

    @property
    def coef(self) -> float | Tensor:
        """The coefficient in the Ray actor, reward per nat; may be changed for all transforms."""
        return self._ask("coefficient")

    @coef.setter
    def coef(self, value: float | Tensor) -> None:
        self._ask("coefficient", value)

    coeff = coef

    def _ask(self, method: str, *arguments: object) -> Any:
        import ray

        return ray.get(getattr(self._actor, method).remote(*arguments))

    def _steps(self) -> list[Transform | None]:
        """Return the transforms to run, in order; None stands for those in the Ray actor."""
        steps: list[Transform | None] = []
        for part in self.transforms:
            if not getattr(part, "is_shell", False):
                steps.append(part)
            elif None not in steps:
                steps.append(None)
        return steps

    def _serve(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        sent = [  # on the CPU and without a device, since the Ray actor's device may differ
            each if each.device is None else each.cpu().clear_device_()
            for each in (tensordict.exclude("next"), next_tensordict)
        ]
        written = self._ask("step", *sent)
        if next_tensordict.device is not None:
            written = written.to(next_tensordict.device)
        return next_tensordict.update(written)

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        for part in self._steps():
            run = self._serve if part is None else part._step
            next_tensordict = run(tensordict, next_tensordict)
        return next_tensordict

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Apply to a batch, in place; without "next", results are written to the root."""
        for part in self._steps():
            next_tensordict = tensordict.get("next", None)
            if part is not None:
                tensordict = part(tensordict)
            elif next_tensordict is None:
                tensordict = self._serve(tensordict, tensordict)
            else:
                tensordict = tensordict.set("next", self._serve(tensordict, next_tensordict))
        return tensordict

    def __repr__(self) -> str:
        parts = ", ".join(type(part).__name__ for part in self.transforms)
        return f"{type(self).__name__}(actor={self._actor_name or self._actor}, parts=[{parts}])"
