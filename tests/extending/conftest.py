"""The page's files in the current folder, which is outside the repository."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.extending.page import files


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """The page's files in the current folder."""
    for name, text in files().items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path
