"""Pages without their charts, which take most of the time."""

import pytest


@pytest.fixture
def charts() -> None:
    """For a test that looks at the charts of a page."""


@pytest.fixture(autouse=True)
def _without_charts(request: pytest.FixtureRequest) -> None:
    if "charts" not in request.fixturenames:
        request.getfixturevalue("without_charts")
