"""Language runs that charge another divergence of the tokens' distributions than the reverse KL."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runs.commands import rows_of
from tests.train.test_divergence_runs import DUAL, EXACT, assert_charged

pytestmark = pytest.mark.integration


@pytest.mark.parametrize("placement", ["loss", "split"])
@pytest.mark.parametrize("divergence", ["forward", "js"])
def test_a_language_run_records_what_it_charges(exits, divergence, placement) -> None:
    words = (f"kl.divergence={divergence}", f"kl.placement={placement}")
    code, _, err = exits(*EXACT, *words, *DUAL, "frames=48")
    assert (code, err) == (0, "")
    rows = rows_of(Path("run"))
    assert_charged(rows, placement)
    for row in rows:
        per_response = row["div/ref/charged"] * row["reward/episode_length"]
        assert row["div/ref/charged_seq"] == pytest.approx(per_response, rel=1e-5, abs=1e-9)
        assert "div/ref/charged_error" not in row
