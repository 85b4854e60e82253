"""Pages without their pictures, which take most of the time."""

from __future__ import annotations

import pytest


@pytest.fixture
def pictures() -> None:
    """For a test that looks at PNGs and SVGs."""


@pytest.fixture(autouse=True)
def _without_pictures(request: pytest.FixtureRequest) -> None:
    if "pictures" not in request.fixturenames:
        request.getfixturevalue("without_pictures")
