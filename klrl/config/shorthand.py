"""Shorthand for policies that klrl did not train: code, or an ONNX file, in place of a run folder.

``actor.init=FILE.py:make`` is short for ``actor=custom actor.target=FILE:make``, and
``reference.path=FILE.py:make`` for ``reference=custom reference.target=FILE:make``. An ONNX file as
``reference.path`` is read by :class:`klrl.control.policy.onnx_policy.OnnxPolicy`.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

from klrl.base.errors import ConfigError
from klrl.base.files import expanded
from klrl.base.sources import find
from klrl.base.tables import yaml_text
from klrl.config.choices import CONTROL, choices_for
from klrl.config.fields import OwnPart
from klrl.config.given import Given
from klrl.config.own.find import WRITTEN
from klrl.config.schemas.control import ActorConfig

_CODE = re.compile(r"(.+):([A-Za-z_][\w.]*)")
#: The part that reads an ONNX file.
_ONNX = "klrl.control.policy.onnx_policy:OnnxPolicy"
#: An actor's choice -> ``actor.distribution`` of a custom actor.
_DISTRIBUTIONS = ("normal", "tanh_normal", "categorical")
_INIT = ("actor.init", "actor.init_which")


def part_of(value: str) -> OwnPart | None:
    """Return the part that a value names: ``FILE.py:make``, ``module:Name`` or an ONNX file.

    Returns None for other values, such as a folder, also one with a colon in its name.

    Raises:
        ConfigError: no such file, or Python imports another file by the name of FILE.py.
    """
    path, code = expanded(value), _CODE.fullmatch(value)
    if value.endswith(".onnx"):
        return OwnPart(_ONNX, args={"file": str(path.absolute()), "digest": digest_of(path)})
    if code is None or path.exists():
        return None
    module, name = code.groups()
    if not module.endswith(".py"):
        return OwnPart(value)
    file = expanded(module).resolve()
    if not file.is_file():
        raise ConfigError(f"{value}: no such file {module}; fix the path")
    imported = sys.modules.get(file.stem)
    spec = imported.__spec__ if imported else find(file.stem, [str(Path.cwd()), str(file.parent)])
    found = spec.origin if spec else None
    if found is None or Path(found).resolve() != file:
        raise ConfigError(f"{value}: Python imports {file.stem} from {found}; rename the file")
    return OwnPart(f"{file.stem}:{name}", path=str(file.parent))


def _value(given: Sequence[Given], key: str) -> str:
    """Return the last value of a key, without Hydra's quotes and escapes; empty if it is null."""
    named = [each for each in given if each.key == key]
    return str(named[-1].parsed.value() or "") if named else ""


def _networks_of(given: Sequence[Given]) -> list[Given]:
    """Return the settings of the networks of the run in ``actor.init``, if the user gave none."""
    init = _value(given, "actor.init")
    if not init or any(each.group == "actor" and each.key not in _INIT for each in given):
        return []
    try:
        stored = yaml.safe_load(yaml_text(expanded(init) / ".hydra" / "config.yaml"))
    except (OSError, ValueError, yaml.YAMLError):
        return []  # the search for the run reports it
    actor = stored.get("actor") if isinstance(stored, Mapping) else None
    known = {*choices_for("actor", CONTROL)} - {"custom"}  # code is for the user to name
    if not isinstance(actor, Mapping) or actor.get("name") not in known:
        return []
    values = {key: actor[key] for key in ActorConfig.shapes if key in actor}
    return [
        Given(f"actor={actor['name']}"),
        *(Given(f"actor.{key}={json.dumps(value)}") for key, value in values.items()),
    ]


def spelled_out(given: Sequence[Given]) -> list[Given]:
    """Replace ``actor.init`` and ``reference.path`` by a custom part if they name no folder.

    Raises:
        ConfigError: an ONNX file as ``actor.init``; it has no gradient.
    """
    words, folders = list(given), dict[str, str | None]()
    for each in words:
        WRITTEN.pop(each, None)
    for key, choice in (("actor.init", "actor"), ("reference.path", "reference")):
        value = _value(words, key)
        if choice == "actor" and value.endswith(".onnx"):
            raise ConfigError(
                f"{key}={value}: an ONNX file has no gradient; train a policy to act like it: "
                f"experiment=distill reference.path={value}"
            )
        if (part := part_of(value)) is None:
            continue
        module = str(part.target).partition(":")[0]
        if folders.setdefault(module, part.path) != part.path:
            raise ConfigError(f"{key}={value}: two files are named {module}.py; rename one")
        chosen = [each.value for each in words if each.key == choice]
        words = [each for each in words if each.key not in (key, choice)]
        values: dict[str, object] = {"target": part.target, "path": part.path}
        values |= {f"args.{name}": value for name, value in part.args.items()}
        if choice == "actor":
            values["init"] = None  # an experiment may have a value
            values["distribution"] = chosen[-1] if chosen and chosen[-1] in _DISTRIBUTIONS else None
            words.append(Given("actor.init=null"))
        WRITTEN[f"{choice}.target={part.target}"] = f"{key}={value}"
        words.append(Given(f"{choice}=custom"))
        words += [
            Given(f"{choice}.{name}={json.dumps(value)}")
            for name, value in values.items()
            if value is not None
        ]
    return [*_networks_of(words), *words]


def digest_of(file: str | Path) -> str:
    """Return the SHA-256 of a file.

    Raises:
        ConfigError: the file cannot be read.
    """
    try:
        return hashlib.sha256(Path(file).read_bytes()).hexdigest()
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}; give an ONNX file") from error
