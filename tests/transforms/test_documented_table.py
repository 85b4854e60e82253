"""Classes x arguments x attributes of TorchRL's documents, against klrl and the installed TorchRL.

``python -m tests.transforms.test_documented_table`` prints the table.
"""

import ast
import importlib
import inspect
from pathlib import Path
from typing import Any

import torch
import yaml

from klrl.envs import transforms as control
from klrl.envs.llm.transforms import kl as llm
from klrl.objectives import KLPENPPOLoss
from klrl.objectives.ppo import _RENAMED
from tests.losses.test_documented import Problem
from tests.transforms.llm_toys import network, pair, wrapper
from tests.transforms.toys import actor

STORED = Path(__file__).with_name("documented.yaml")
LLM = "envs.llm.transforms.kl"
NO_DEFAULT, ABSENT = "-", "absent"
#: What is not as documented: (class, argument or attribute) -> why.
ARGUED = {
    ("objectives.KLPENPPOLoss", f"{key}_key"): "deprecated there, refused by TorchRL: set_keys"
    for key in ("advantage", "value_target", "value")
} | {
    (f"{LLM}.{kind}", "actor_name"): "with service_backend='ray' alone"
    for kind in ("KLRewardTransform", "RetrieveKL")
}
#: An object of each class that names attributes.
MAKE = {
    "envs.transforms.KLRewardTransform": lambda: control.KLRewardTransform(actor()),
    "objectives.KLPENPPOLoss": lambda: KLPENPPOLoss(Problem().actor, Problem().critic),
    f"{LLM}.KLRewardTransform": lambda: llm.KLRewardTransform(wrapper(network(), "tokens")),
    f"{LLM}.RetrieveLogProb": lambda: llm.RetrieveLogProb(pair()[0]),
    f"{LLM}.RetrieveKL": lambda: llm.RetrieveKL(*pair()),
    f"{LLM}.KLComputation": llm.KLComputation,
}


def default_of(kind: type | None, name: str) -> Any:
    """As a class, or one that it hands its ``**kwargs`` to, declares it."""
    name = _RENAMED.get(name, name)
    for each in kind.__mro__ if kind else ():
        shown = each if "__signature__" in vars(each) else each.__init__
        if name in (known := inspect.signature(shown).parameters):
            value = known[name].default
            return NO_DEFAULT if value is inspect.Parameter.empty else value
    return ABSENT


def table() -> list[tuple[str, str, Any, Any, Any]]:
    """Class, argument or .attribute: as documented, in klrl, in the installed TorchRL."""
    rows: list[tuple[str, str, Any, Any, Any]] = []
    for name, known in yaml.safe_load(STORED.read_text("utf-8")).items():
        module, kind = name.rsplit(".", 1)
        ours, theirs = (
            getattr(importlib.import_module(f"{package}.{module}"), kind, None)
            for package in ("klrl", "torchrl")
        )
        made = MAKE[name]() if name in MAKE else None
        rows.append((name, "", "named", *("there" if each else ABSENT for each in (ours, theirs))))
        for argument, default in known["arguments"].items():
            documented = default if default == NO_DEFAULT else ast.literal_eval(default)
            found = default_of(ours, argument)
            if found is None and documented is not None:  # chosen where it is made
                found = getattr(made, _RENAMED.get(argument, argument), None)
                found = round(found.item(), 6) if isinstance(found, torch.Tensor) else found
            rows.append((name, argument, documented, found, default_of(theirs, argument)))
        source = inspect.getsource(theirs) if theirs else ""
        for attribute in known["attributes"]:
            here = hasattr(made, attribute) or hasattr(ours, attribute)
            there = hasattr(theirs, attribute) or attribute in source
            said = ("there" if each else ABSENT for each in (here, there))
            rows.append((name, f".{attribute}", "named", *said))
    return rows


def gaps() -> set[tuple[str, str]]:
    """What klrl lacks, or has with another default."""
    same = (NO_DEFAULT, "named")  # of these the document says no more than that they are there
    return {
        (name, part)
        for name, part, documented, found, _ in table()
        if (found == ABSENT if documented in same else documented != found)
    }


def test_no_gap_but_those_that_are_argued_for() -> None:
    assert gaps() == set(ARGUED)


if __name__ == "__main__":
    print("| class | argument, .attribute | document | klrl | TorchRL |\n|---|---|---|---|---|")
    for name, part, documented, found, theirs in table():
        why = f": {ARGUED[name, part]}" if (name, part) in ARGUED else ""
        print(f"| {name} | {part} | {documented!r} | {found!r}{why} | {theirs!r} |")
