"""Fixtures of the control tests."""

import pytest


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """A package cache of this test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "klrl" / "update"
