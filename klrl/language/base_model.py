"""The small base model of ``env=sort_digits``: trained once by supervised learning, then cached.

:func:`base_model` is the entry point. It builds below the cache folder under a lock and renames
when all is written, so that an interrupted build leaves nothing and two processes build one model.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

from klrl.base.cache import cache_dir
from klrl.base.errors import ConfigError
from klrl.base.files import replacing
from klrl.language.quiet import no_progress_bar
from klrl.language.sort_digits import make_tokenizer
from klrl.language.supervised import Recipe, make_model, train


def base_model(recipe: Recipe | None = None, cache: Path | None = None) -> Path:
    """The folder of the base model and its tokenizer; built first if the cache has none.

    A build takes 20 to 60 s. Torch's random generator is left unchanged: a run is the same whether
    the model was cached or built.

    Args:
        recipe: default: the one of ``experiment=sort_digits``.
        cache: default: :func:`cache_dir`.

    Raises:
        ConfigError: the cache folder cannot be written.
        RuntimeError: the target was not reached.
    """
    recipe = recipe or Recipe()
    cache = cache or cache_dir()
    folder = cache / f"sort_digits-{recipe.key}"
    if folder.is_dir():
        return folder
    try:
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _only_builder(cache / f"{folder.name}.lock"):
            if not folder.is_dir():
                _build_into(folder, recipe)
    except OSError as error:
        raise ConfigError(
            f"XDG_CACHE_HOME: the base model cannot be written to {cache} "
            f"({error.strerror or error}); point it to a folder that can"
        ) from error
    return folder


@contextmanager
def _only_builder(path: Path) -> Iterator[None]:
    """Hold the lock of one model; the system frees it when its holder dies."""
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        print("another process is building the base model; waiting for it", flush=True)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _build_into(folder: Path, recipe: Recipe) -> None:
    """Build beside the folder, then rename. Only the holder of the lock calls this."""
    for stale in folder.parent.glob(f".{folder.name}-*"):
        shutil.rmtree(stale, ignore_errors=True)
    with replacing(folder) as partial:
        partial.mkdir()
        build(recipe, partial)


# -------------------------------------------------------------------------------------- building


def build(recipe: Recipe, folder: Path) -> dict[str, Any]:
    """Train and save: ``save_pretrained`` of model and tokenizer, and ``built.json``.

    Returns:
        The content of ``built.json``: reward, steps, seconds, parameters, recipe.
    """
    tokenizer = make_tokenizer()
    with torch.random.fork_rng(devices=[]), torch.enable_grad(), _one_thread():
        torch.manual_seed(recipe.seed)
        model = make_model(recipe, tokenizer)
        summary = train(model, tokenizer, recipe)
    with no_progress_bar():
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "built.json").write_text(json.dumps(summary, indent=1))
    return summary


@contextmanager
def _one_thread() -> Iterator[None]:
    """One thread: the same sums whatever ``threads`` is, and faster on busy cores than two."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
