"""Pages without their charts, which take most of the time."""

import pytest
from markupsafe import Markup

from klrl.report.pictures import Drawing


@pytest.fixture
def charts() -> None:
    """For a test that looks at the charts of a page."""


@pytest.fixture
def pictures() -> None:
    """For a test that looks at the PNGs and SVGs too."""


@pytest.fixture(autouse=True)
def _without_charts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = {"charts", "pictures"} & {*request.fixturenames}
    if "pictures" not in wanted:
        request.getfixturevalue("without_pictures")
    if not wanted:

        def blank(chart, key):
            return Drawing(key, chart.title, "", Markup(), "0 0 1 1", {})

        monkeypatch.setattr("klrl.report.write.draw_chart", blank)
