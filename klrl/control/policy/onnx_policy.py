"""An ONNX file as a reference, a teacher or a side of ``klrl kl``; onnxruntime computes it."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor

from klrl.base.errors import ConfigError, first_line
from klrl.config.shorthand import digest_of

#: Names of outputs that describe a distribution, in the order of a family's parameters.
_PARAMETERS = (("logits",), ("loc", "scale"))


class OnnxPolicy:
    """A policy in an ONNX file: a function from raw observations to a distribution's parameters.

    The file has one input, observations [B, D], or one per key of the observation, and the outputs
    ``logits`` [B, K], or ``loc`` and ``scale`` [B, A]. ``klrl export RUN policy.onnx`` writes such
    files.

    Args:
        file: the file's path.
        digest: the SHA-256 of the file.

    Raises:
        ConfigError: no such file, a file with another digest or other outputs, or no onnxruntime.
    """

    def __init__(self, file: str, digest: str) -> None:
        try:
            import onnxruntime
        except ImportError as error:
            raise ConfigError(f"{file}: needs onnxruntime: pip install 'klrl[onnx]'") from error
        if digest_of(file) != digest:
            raise ConfigError(f"{file}: has changed since this run began; restore it")
        try:
            session: Any = onnxruntime.InferenceSession(file)
        except Exception as error:  # its errors have no other common class
            told = f"onnxruntime refuses it ({first_line(error)[:200]}); give an ONNX file"
            raise ConfigError(f"{file}: {told}") from error
        self._session, self._inputs = session, [each.name for each in session.get_inputs()]
        outputs = [each.name for each in session.get_outputs()]
        found = [names for names in _PARAMETERS if {*names} <= {*outputs}]
        if not found:
            told = f"its outputs are {', '.join(outputs)}; name them logits, or loc and scale"
            raise ConfigError(f"{file}: {told}")
        self._outputs = found[0]

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        return self  # a session has no state, and cannot be copied

    def __call__(self, observation: Tensor | dict[str, Tensor]) -> tuple[Tensor, ...]:
        """Compute the parameters of observations [B, D], or of a dictionary of them."""
        given = observation if isinstance(observation, dict) else {self._inputs[0]: observation}
        device = next(iter(given.values())).device
        arrays = {name: given[name].cpu().numpy() for name in self._inputs}
        values = self._session.run(list(self._outputs), arrays)
        return tuple(torch.from_numpy(each).to(device) for each in values)
