"""A recurrent reference would be asked with the policy's hidden state: it is refused by name."""

from collections.abc import Callable

import pytest
from tensordict.nn import NormalParamExtractor, TensorDictModule, TensorDictSequential
from torch import nn
from torchrl.modules import (
    GRUModule,
    IndependentNormal,
    LSTMModule,
    ProbabilisticActor,
    ValueOperator,
)

from klrl.kl import (
    FrozenPolicy,
    KLConstrainedTransform,
    KLDivergenceTransform,
    KLRewardTransform,
    ReferenceModelLogProbTransform,
    RetrieveKL,
    RetrieveLogProb,
)
from klrl.losses import ClipPPOLoss, KLPENPPOLoss
from tests.transforms.toys import actor

CELLS: dict[str, Callable[..., nn.Module]] = {
    "lstm": lambda **how: LSTMModule(**how, in_key="observation", out_key="hidden"),
    "own keys": lambda **how: GRUModule(
        **how,
        in_keys=["observation", ("agent", "memory")],
        out_keys=["hidden", ("next", "agent", "memory")],
    ),
}


def recurrent(cell: str = "lstm") -> ProbabilisticActor:
    head = TensorDictModule(
        nn.Sequential(nn.Linear(8, 4), NormalParamExtractor()), ["hidden"], ["loc", "scale"]
    )
    return ProbabilisticActor(
        TensorDictSequential(CELLS[cell](input_size=3, hidden_size=8), head),
        ["loc", "scale"],
        distribution_class=IndependentNormal,
        return_log_prob=True,
    )


def critic() -> ValueOperator:
    return ValueOperator(nn.Linear(3, 1), in_keys=["observation"])


TAKES = {
    "actor": KLRewardTransform,
    "frozen_model": ReferenceModelLogProbTransform,
    "frozen_model ": KLConstrainedTransform,
    "reference": lambda model: KLDivergenceTransform(model, estimator="exact"),
    "model": RetrieveLogProb,
    "model ": lambda model: RetrieveKL(actor(), model),
    "reference ": lambda model: ClipPPOLoss(actor(), critic(), reference=model),
    "reference  ": lambda model: KLPENPPOLoss(recurrent(), critic(), reference=model),
}


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("name", TAKES)
def test_a_recurrent_reference_is_refused(name: str, cell: str) -> None:
    key = "memory" if cell == "own keys" else "recurrent_state"
    with pytest.raises(ValueError, match=f"^{name.strip()}: is recurrent .*{key}.*; give a policy"):
        TAKES[name](recurrent(cell))


def test_a_frozen_copy_of_one_is_no_way_round() -> None:
    with pytest.raises(ValueError, match="is recurrent"):
        ReferenceModelLogProbTransform(FrozenPolicy.copy_of(recurrent()))
