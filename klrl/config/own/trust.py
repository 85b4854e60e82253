"""Decides whether klrl may import the code that a stored run names.

A run folder may come from anyone, and its settings name modules to import and functions to call.
klrl imports only code that this user named in this process, has run before, or trusts.

When this user starts a run, klrl stores digests of the run's code in the user's state folder. A
digest covers the setting, the name, the args, the folder and the source of the code. The source
alone is not enough: in a different folder, the same ``.py`` files may lie next to a malicious
``.pyc``. A run that this user started may import its code from the same folder even if the source
has changed since.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from klrl.base.cache import Untrusted, private_folder, state_dir, trusted
from klrl.base.errors import ConfigError, first_line
from klrl.base.files import open_in_place
from klrl.base.sources import find, source_of
from klrl.config.fields import OwnPart
from klrl.config.jobs import Env, JobConfig
from klrl.config.own.parts import env_code, own_parts, top_level

#: Code that the user named in this process: digests, and overrides such as ``env.id=module:Id``.
NAMED: set[str] = set()

Parts = Iterable[tuple[str, OwnPart]]


class _Code(NamedTuple):
    """Code that a setting names."""

    setting: str
    call: str  # module, name and args
    folder: str  # the module's folder, or its file if it has no source
    source: str  # the digest or version of the module


def name_code(config: JobConfig) -> None:
    """Add the code of a job to :data:`NAMED`."""
    NAMED.update(map(_digest, _codes(own_parts(config), config.env)))


def record_code(run: Path, config: JobConfig) -> None:
    """Record the code of a run that this user starts, in the user's state folder.

    Raises:
        Untrusted: others own the state folder, or can write to it.
        OSError: this user cannot write to it.
    """
    found = _codes(own_parts(config), config.env)
    for key in [_run_key(run, found), *map(_digest, found)] if found else ():
        os.close(open_in_place(_ledger() / key, os.O_WRONLY))


def check_known(run: Path, parts: Parts, env: Env | None = None) -> None:
    """Refuse a stored run if this user has not named, called or trusted its code.

    ``env`` adds the code of ``env.id`` and ``env.reward``. Each part's ``path`` becomes the folder
    in which its module was found, or None.
    """
    listed = list(parts)
    found = _codes(listed, env)
    asked = [c for c in found if not {_digest(c), f"{c.setting}={c.call}"} & NAMED]
    why = "none of your runs has called it"
    if asked and not trusted(run):
        try:
            known = {path.name for path in _ledger().iterdir()}
        except (Untrusted, OSError, RuntimeError) as error:  # RuntimeError: no home folder
            known, why = set(), f"the record of code you ran is unreadable ({first_line(error)})"
        for code in [c for c in asked if not {_digest(c), _run_key(run, found)} & known]:
            raise ConfigError(
                f"{run}: {code.setting} would import and call {code.call:.200} from "
                f"{code.folder}, and {why}; read the code, then add trust={run}"
            )
    folders = {code.setting: code.folder for code in found}
    for setting, part in listed:
        part.path = folders.get(f"{setting}.target") or None


def _codes(parts: Parts, env: Env | None = None) -> list[_Code]:
    """List the code that the settings would import now; leave out modules that are not found."""
    listed = list(parts)
    folders = [str(Path.cwd()), *(part.path for _, part in listed if part.path)]
    calls = [(f"{setting}.target", part.target, part.args) for setting, part in listed]
    found = []
    for setting, target, args in [*calls, *(env_code(env) if env else ())]:
        top = top_level(target)
        if (spec := find(top, folders)) is not None:
            at = str(spec.origin), ""
            with suppress(ImportError):  # a compiled module such as posix has no source
                source = source_of(top, folders)
                at = source.folder, source.digest or str(source)
            found.append(_Code(setting, f"{target} with {args}" if args else target, *at))
    return found


def _digest(words: Iterable[str]) -> str:
    return hashlib.sha256(repr(tuple(words)).encode("utf-8", "surrogatepass")).hexdigest()


def _run_key(run: Path, found: Iterable[_Code]) -> str:
    """Return a digest of a run's folder and of what its settings call, whatever the source is."""
    return _digest([str(run.resolve()), *(repr(code[:3]) for code in found)])


def _ledger() -> Path:
    folder = state_dir() / "code"
    private_folder(folder)
    return folder
