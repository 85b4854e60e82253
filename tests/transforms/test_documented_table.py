"""Classes x arguments x attributes of TorchRL's documents, against klrl and the installed TorchRL.

``python -m tests.transforms.test_documented_table`` prints the table; a folder with the documents
as its argument reads them first, and writes documented.yaml.
"""

import ast
import importlib
import inspect
import re
import sys
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
#: The module that a document is about, by the document's number.
MODULES = dict.fromkeys(("000", "001", "002"), "envs.transforms")
MODULES |= {"003": "objectives", "004": (LLM := "envs.llm.transforms.kl")}
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


def signature(text: str) -> dict[str, str]:
    """Argument -> default, of the text between a signature's parentheses."""
    known: ast.arguments = ast.parse(f"def f({text}): pass").body[0].args  # type: ignore[attr-defined]
    without = [None] * (len(known.args) - len(known.defaults))
    values = [*without, *known.defaults, *known.kw_defaults]
    told = [NO_DEFAULT if value is None else ast.unparse(value) for value in values]
    names = [each.arg for each in (*known.args, *known.kwonlyargs)]
    return {name: value for name, value in zip(names, told, strict=True) if name != "self"}


ENTRY = r"(?:^|(?<=[\s.]))(\w+) \((?:[^()]|\([^()]*\))*\)\s?(?:–|:)\s"


def described(text: str) -> dict[str, str]:
    """Argument -> default, of the lists behind "Args" and "Parameters"."""
    lists = re.split(r"Args:|Parameters:", text, maxsplit=1)[-1]
    lists = re.split(r"Examples?:|Examples\n|\nNote\n|Note:|Returns", lists)[0]
    _, *parts = re.split(ENTRY, lists, flags=re.MULTILINE)
    found = {}
    for name, said in zip(parts[::2], parts[1::2], strict=True):
        default = re.search(r"[Dd]efault(?:s to|:)\s*`*([^`\s]+?)`*\.?(?:\s|$)", said)
        found[name] = default[1] if default else NO_DEFAULT
    return found


def read(folder: Path) -> dict[str, dict[str, Any]]:
    """All classes of the documents."""
    table: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.glob("0*.txt")):
        text = path.read_text("utf-8")
        for part in re.split(r"(?=\bclass [\w.]+\()", text)[1:]:
            head = re.match(r"class ([\w.]*?)(\w+)\((.*?)\)(?:\[|\n)", part, re.DOTALL)
            made = re.search(r"def __init__\((.*?),?\s*\):", part, re.DOTALL)
            name = re.match(r"class (?:[\w.]+\.)?(\w+)", part)[1]  # type: ignore[index]
            own = signature(made[1]) if made else signature(head[3]) if head and head[1] else {}
            known = table.setdefault(
                f"{MODULES[path.name[:3]]}.{name}", {"arguments": {}, "attributes": []}
            )
            for argument, default in (described(part) | own).items():
                if known["arguments"].get(argument, NO_DEFAULT) == NO_DEFAULT:
                    known["arguments"][argument] = default
            named = re.findall(
                r"\bself\.([a-z]\w*) = |register_buffer\(\"(\w+)\"|\b([A-Z_]{8,}) = \["
                r"|@property\s+def (\w+)|self\.__dict__\[\"(\w+)\"\] = |def ([a-z]\w*)\( ?self"
                r"|^- (\w+)\(|(set_keys)\(",
                part,
                re.MULTILINE,
            )
            more = {next(filter(None, groups)) for groups in named}
            known["attributes"] = sorted({*known["attributes"], *more})
    return table


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
    if len(sys.argv) > 1:
        found = read(Path(sys.argv[1]))
        text = yaml.safe_dump(found, sort_keys=False, width=100, default_flow_style=None)
        STORED.write_text(text, "utf-8")
    print("| class | argument, .attribute | document | klrl | TorchRL |\n|---|---|---|---|---|")
    for name, part, documented, found, theirs in table():
        why = f": {ARGUED[name, part]}" if (name, part) in ARGUED else ""
        print(f"| {name} | {part} | {documented!r} | {found!r}{why} | {theirs!r} |")
