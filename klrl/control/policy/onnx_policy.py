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

    The file has one input, observations [B, D], and the outputs ``logits`` [B, K], or ``loc`` and
    ``scale`` [B, A]. ``klrl export RUN policy.onnx`` writes such files.

    Args:
        file: the file's path.
        digest: the SHA-256 of the file.
        inputs: the length D of an observation.

    Raises:
        ConfigError: no such file, a file with another digest or other outputs, a task whose
            observations are no vectors, or no onnxruntime.
    """

    def __init__(self, file: str, digest: str, inputs: object) -> None:
        if not isinstance(inputs, int):
            told = "this task's are of another kind; name code that calls onnxruntime"
            raise ConfigError(f"{file}: an ONNX file takes vectors of observations, but {told}")
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
        self._session, self._input = session, session.get_inputs()[0].name
        outputs = [each.name for each in session.get_outputs()]
        found = [names for names in _PARAMETERS if {*names} <= {*outputs}]
        if not found:
            told = f"its outputs are {', '.join(outputs)}; name them logits, or loc and scale"
            raise ConfigError(f"{file}: {told}")
        self._outputs = found[0]
        named = session.get_modelmeta().custom_metadata_map.get("distribution")
        #: The distribution's name, if known: loc and scale of others' files are a Gaussian's.
        self.distribution = named or ("normal" if self._outputs[0] == "loc" else None)
        if len(session.get_inputs()) > 1:
            told = f"{', '.join(each.name for each in session.get_inputs())}; give one input"
            raise ConfigError(f"{file}: its inputs are {told}, observations [B, D]")

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        return self  # a session has no state, and cannot be copied

    def __call__(self, observation: Tensor) -> tuple[Tensor, ...]:
        """Compute the parameters of observations [B, D]."""
        values = self._session.run(list(self._outputs), {self._input: observation.cpu().numpy()})
        return tuple(torch.from_numpy(each).to(observation.device) for each in values)
