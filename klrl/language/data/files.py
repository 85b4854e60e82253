"""Reads the prompts of a split from a file or a folder.

The package ``datasets`` reads what is not JSON. Nothing is downloaded: ``env.data`` is a path.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import tempfile
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from klrl.base.errors import ConfigError, first_line
from klrl.base.files import expanded, files_below
from klrl.language.data.prompts import CONTENT, Fields, Prompt, parse_row, read_json_file

#: Suffixes of data files.
_SUFFIXES = (".jsonl", ".json", ".parquet")
#: A folder that contains one of these files was written by ``save_to_disk`` of ``datasets``.
_SAVED = ("dataset_dict.json", "state.json")
#: JSON files that describe data, but contain none.
_DESCRIBING = {*_SAVED, "dataset_info.json", "dataset_infos.json"}


def read_prompts(
    path: str | Path,
    setting: str = "env.data",
    split: str = "train",
    *,
    set_by: str | None = None,
) -> list[Prompt]:
    """Read the prompts of a data set.

    A row has ``prompt`` (a text or a conversation) or ``messages`` (a conversation), and any other
    fields; see :func:`klrl.language.data.prompts.read_json_file`.

    Args:
        path: a file of JSON lines, a JSON list (``.json``) or parquet; a folder of such files;
            or a folder that ``Dataset.save_to_disk`` wrote.
        setting: the setting that gives ``path``, for messages.
        split: the split to read. In a folder of data files, names of files and folders determine
            the splits; see :meth:`_Split._split_of`.
        set_by: the setting that requests ``split``; None if ``split`` is a default. Data without
            splits are read whole if ``set_by`` is None, else refused.
    """
    folder, where = expanded(path), f"{setting}={path}"
    chosen = _Split(split, where, set_by)
    if not folder.is_dir():
        prompts = _read_file(path, setting)
        chosen.check(set())
        return prompts
    if any((folder / name).is_file() for name in _SAVED):

        def of_split(datasets: Any) -> Any:
            list(files_below(folder))  # refuses pipes
            saved = datasets.load_from_disk(str(folder))
            chosen.check(set(saved) if isinstance(saved, dict) else set())
            return saved[split] if isinstance(saved, dict) else saved

        return _prompts(_rows(where, of_split), where)
    found = (file for file in folder.rglob("*") if file.suffix in _SUFFIXES)
    files = sorted(file for file in found if file.name not in _DESCRIBING)
    if not files:
        raise ConfigError(f"{where}: has no .jsonl, .json or .parquet file; give data files")
    return [prompt for file in chosen.of(files, folder) for prompt in _read_file(file, setting)]


def hold_out(prompts: Sequence[Prompt], share: float) -> tuple[list[Prompt], list[Prompt]]:
    """Split off random prompts for evaluation, the same in every run.

    Args:
        prompts: at least two different ones; rows of the same prompt stay together.
        share: the share of different prompts to split off, between 0 and 1; each part gets at
            least one.

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


# -------------------------------------------------------------------------------------- reading


def _read_file(path: str | Path, setting: str) -> list[Prompt]:
    file, where = expanded(path), f"{setting}={path}"
    if not file.is_file() or file.suffix != ".parquet":
        return read_json_file(path, setting)
    with tempfile.TemporaryDirectory() as cache:
        how = {"cache_dir": cache, "keep_in_memory": True}
        rows = _rows(where, lambda datasets: datasets.Dataset.from_parquet(str(file), **how))
    return _prompts(rows, where)


def _prompts(rows: Sequence[Fields], where: str) -> list[Prompt]:
    if not rows:
        raise ConfigError(f"{where}: has no prompts; give rows with prompt or messages")
    return [parse_row(_without_nulls(row), f"{where} row {i}") for i, row in enumerate(rows, 1)]


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


#: Words that denote a split in the name of a file or folder.
_SPLITS = frozenset(
    [
        *("train", "training", "test", "testing", "validation", "valid", "val", "dev"),
        *("eval", "evaluation"),
    ]
)
#: Name of a shard that the ``datasets`` library wrote, such as ``train_sft-00000-of-00002``.
_SHARD = re.compile(r"(.+)-\d+-of-\d+")
_NOT_A_WORD = re.compile(r"[-._ \d]+")


@dataclass(frozen=True)
class _Split:
    """A split to read. Messages name the data by ``where``, the split's setting by ``set_by``."""

    name: str
    where: str
    set_by: str | None

    @property
    def setting(self) -> str:
        """The setting that requests the split, for messages."""
        return f"{self.set_by or 'env.split'}={self.name}"

    def check(self, there: Collection[str]) -> None:
        """Refuse the split if it is not one of ``there``, the splits of the data.

        If the data have no splits, refuse the split only if ``set_by`` requests it.
        """
        if there and self.name not in there:
            names = ", ".join(sorted(there))
            raise ConfigError(
                f"{self.setting}: {self.where} has no such split; choose one of {names}"
            )
        if not there and self.set_by is not None:
            raise ConfigError(
                f"{self.setting}: {self.where} has no splits; drop it, or give a folder of files "
                "named by split"
            )

    def of(self, files: Sequence[Path], folder: Path) -> list[Path]:
        """Return the files of the split; all files if no path names a split."""
        called = {file: self._split_of(file.relative_to(folder)) for file in files}
        named = {file: each for file, each in called.items() if each is not None}
        self.check({split for split, _ in named.values()})
        chosen = {file: part for file, (split, part) in named.items() if split == self.name}
        firsts = {part: file for file, part in reversed(chosen.items())}
        if len(firsts) > 1:
            names = sorted(file.relative_to(folder).as_posix() for file in firsts.values())
            raise ConfigError(
                f"{self.setting}: {self.where} has this split in {', '.join(names[:-1])} and "
                f"{names[-1]}; give a file, or a folder with one of them"
            )
        return list(chosen or files)

    def _split_of(self, file: Path) -> tuple[str, str] | None:
        """Return a path's split and a name shared by its data set's files; None if it has no split.

        A word of the file's name gives the split, as in ``train.jsonl``, ``gsm8k_train.jsonl`` and
        ``train-0.jsonl``; without such a word, a folder's name gives it, as in ``train/a.jsonl``.
        The shard ``train_sft-00000-of-00002`` belongs to the split ``train_sft``.
        """
        shard = _SHARD.fullmatch(file.stem)
        whole = shard[1] if shard else file.stem
        words = [word for word in _NOT_A_WORD.split(whole) if word in _SPLITS]
        if whole == self.name or (shard and words):
            return whole, str(file.with_name(whole))
        if len(set(words)) > 1:
            raise ConfigError(
                f"{self.where}: {file.as_posix()} names two splits, {' and '.join(words)}; "
                "rename it"
            )
        if words:
            numbered = re.fullmatch(rf"(.*{words[0]})[-._ ]?\d+", whole)
            return words[0], str(file.with_name(numbered[1] if numbered else whole))
        named = (each for each in file.parents if each.name in _SPLITS or each.name == self.name)
        return next(((each.name, str(each)) for each in named), None)


# ----------------------------------------------------------------------------- through datasets


def _rows(where: str, read: Callable[[Any], Any]) -> Sequence[Fields]:
    """Call ``read`` with the package ``datasets``, without progress bars and logs; return rows."""
    if find_spec("datasets") is None:
        raise ConfigError(
            f"{where}: the package datasets is not installed; pip install 'klrl[data]', or give "
            "JSON lines"
        )
    import datasets

    silent, verbosity = (
        datasets.utils.are_progress_bars_disabled(),
        datasets.logging.get_verbosity(),
    )
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(logging.CRITICAL)
    try:
        rows: Sequence[Fields] = read(datasets).to_list()
    except ConfigError:
        raise
    except Exception as error:  # the libraries' errors have no common base class
        raise ConfigError(
            f"{where}: cannot be read ({first_line(error)}); write it again with datasets"
        ) from error
    finally:
        datasets.logging.set_verbosity(verbosity)
        if not silent:
            datasets.enable_progress_bars()
    return rows
