"""Reads the prompts of a split from a file or a folder.

klrl reads JSON lines; the package ``datasets`` reads the rest. Nothing is downloaded: ``env.data``
is a path.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from klrl.base.errors import ConfigError, first_line
from klrl.base.files import expanded, files_below, read_plain
from klrl.base.tables import LOADER
from klrl.language.data.prompts import CONTENT, Fields, Prompt, parse_row, read_json_file

#: The default of ``env.split``.
SPLIT = "train"
#: A folder that contains one of these files was written by ``save_to_disk`` of ``datasets``.
_SAVED = ("dataset_dict.json", "state.json")
#: Keys of a folder's description under which ``datasets`` looks for data.
_DATA = ("configs", "data_files", "data_dir")


def read_prompts(
    path: str | Path,
    setting: str = "env.data",
    split: str = SPLIT,
    *,
    set_by: str | None = None,
    key: str = "prompt",
) -> list[Prompt]:
    """Read the prompts of a data set.

    A row has ``prompt`` (a text or a conversation) or ``messages`` (a conversation), and any other
    fields; see :func:`klrl.language.data.prompts.read_json_file`.

    Args:
        path: a file of JSON lines, or a JSON list (``.json``); or what ``datasets`` reads: a
            parquet file, a folder that ``save_to_disk`` wrote, or a folder of data files.
        setting: the setting that gives ``path``, for messages.
        split: the split to read. In a folder of data files, ``datasets`` finds the splits by the
            names of files and folders.
        set_by: the setting that requests ``split``; None if ``split`` is a default. Data without
            splits are read whole if ``set_by`` is None, else refused.
        key: the field that contains the prompt.
    """
    place, where = expanded(path), f"{setting}={path}"
    named = f"{set_by or 'env.split'}={split}"
    if not place.is_dir() and (place.suffix != ".parquet" or not place.is_file()):
        prompts, splits = read_json_file(path, setting, key), None
    else:
        with _read_by_datasets(place, where) as read:
            splits = sorted(read) if isinstance(read, dict) else None
            if splits and split not in splits:
                raise ConfigError(
                    f"{named}: {where} has no such split; choose one of {', '.join(splits)}"
                )
            rows: Sequence[Fields] = (read[split] if splits else read).to_list()
        origins = (f"{where} row {i}" for i in range(1, len(rows) + 1))
        pairs = zip(rows, origins, strict=True)
        prompts = [parse_row(_without_nulls(row), origin, key) for row, origin in pairs]
    if splits is None and set_by is not None:
        raise ConfigError(
            f"{named}: {where} has no splits; drop it, or give a folder of files named by split"
        )
    if not prompts:
        raise ConfigError(f"{where}: has no prompts; give rows with prompt or messages")
    return prompts


@contextmanager
def _read_by_datasets(place: Path, where: str) -> Iterator[Any]:
    """Yield a ``Dataset``, or name of split -> ``Dataset``; without progress bars and logs."""
    if find_spec("datasets") is None:
        raise ConfigError(
            f"{where}: the package datasets is not installed; pip install 'klrl[data]', or give a "
            "file of JSON lines"
        )
    import datasets

    silent = datasets.utils.are_progress_bars_disabled()
    verbosity = datasets.logging.get_verbosity()
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(logging.CRITICAL)
    try:
        with tempfile.TemporaryDirectory() as cache:
            how = {"cache_dir": cache, "keep_in_memory": True}
            if place.is_file():
                yield datasets.Dataset.from_parquet(str(place), **how)
                return
            list(files_below(place))  # refuses pipes
            if any((place / name).is_file() for name in _SAVED):
                yield datasets.load_from_disk(str(place))
            else:
                _refuse_addresses(place, where)
                yield datasets.load_dataset(str(place), **how)
    except ConfigError:
        raise
    except Exception as error:  # the libraries' errors have no common base class
        raise ConfigError(
            f"{where}: datasets cannot read it ({first_line(error)}); give a file of JSON lines"
        ) from error
    finally:
        datasets.logging.set_verbosity(verbosity)
        if not silent:
            datasets.enable_progress_bars()


def _refuse_addresses(place: Path, where: str) -> None:
    """Refuse a folder that describes its data by an address, which ``datasets`` would fetch."""
    for name in ("README.md", ".huggingface.yaml"):
        if not (place / name).is_file():
            continue
        text = read_plain(place / name).decode().lstrip("\ufeff")
        if name.endswith(".md"):  # YAML between two lines ---, then text
            text = "".join(re.split(r"^\s*---\s*$", text, maxsplit=2, flags=re.MULTILINE)[1:2])
        try:
            if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, LOADER)):
                raise yaml.YAMLError("it has an alias")  # which may name much in few bytes
            described = yaml.load(text, LOADER)
        except yaml.YAMLError as error:
            told = f"its {name} cannot be read ({first_line(error)}); remove it"
            raise ConfigError(f"{where}: {told}") from error
        named = {key: described.get(key) for key in _DATA} if isinstance(described, dict) else {}
        if "://" in json.dumps(named, default=str):
            raise ConfigError(f"{where}: its {name} names data elsewhere; remove its data_files")


def _without_nulls(row: Fields) -> Fields:
    """Remove nulls that ``datasets`` puts in place of missing fields, also of turns and tools."""

    def filled(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: filled(v) for k, v in value.items() if v is not None}
        return [filled(each) for each in value] if isinstance(value, list) else value

    kept = {*CONTENT, "tools"}
    return {
        k: filled(v) if k in kept else v for k, v in row.items() if k not in kept or v is not None
    }


def hold_out(prompts: Sequence[Prompt], share: float) -> tuple[list[Prompt], list[Prompt]]:
    """Split off random prompts for evaluation, the same in every run.

    ``share``: of different prompts, between 0 and 1; rows of the same prompt stay together. Each
    part gets at least one.

    Returns:
        The training prompts and the held-out prompts, both in their original order.
    """
    keys = [json.dumps(prompt.content, sort_keys=True, default=repr) for prompt in prompts]
    distinct = list(dict.fromkeys(keys))
    if len(distinct) < 2:
        raise ConfigError(
            f"env.eval_share={share:g}: a single prompt cannot be split; set env.eval_share=0"
        )
    count = min(max(round(share * len(distinct)), 1), len(distinct) - 1)
    held = {distinct[i] for i in np.random.default_rng(0).permutation(len(distinct))[:count]}
    pairs = list(zip(keys, prompts, strict=True))
    train = [prompt for key, prompt in pairs if key not in held]
    return train, [prompt for key, prompt in pairs if key in held]


def rows_digest(prompts: Sequence[Prompt]) -> str:
    """Return the SHA-256 of the prompts' rows, in order."""
    sha = hashlib.sha256()
    for prompt in prompts:
        # repr converts the types that parquet has and JSON lacks, such as dates and bytes.
        sha.update(json.dumps(prompt.row, sort_keys=True, default=repr).encode() + b"\n")
    return sha.hexdigest()
