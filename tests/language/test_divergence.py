"""Language runs that charge another divergence of the tokens' distributions than the reverse KL."""

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


def test_a_language_student_learns_the_teachers_distributions(exits) -> None:
    assert exits("optim.lr=0.03", "optim.lr_floor=0.03", "frames=64")[0] == 0
    Path("run").rename("teacher")
    words = ("experiment=distill_text", "reference.path=teacher", "frames=320")
    code, _, err = exits(*words)
    assert (code, err) == (0, "")
    rows = rows_of(Path("run"))
    assert rows[0]["kl/ref/exact"] > 0.01
    assert rows[-1]["kl/ref/exact"] < 0.3 * rows[0]["kl/ref/exact"]
    # Of the score the learner sees nothing: the gain is w * 0, and all of the loss is the KL.
    assert all(row["loss/objective"] == 0 for row in rows)
    assert all(row["loss/kl_ref"] > 0 for row in rows)
