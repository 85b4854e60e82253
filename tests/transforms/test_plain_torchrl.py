"""docs/plain_torchrl.md: its file runs, and its numbers are those of the closed forms."""

import re
import textwrap
from pathlib import Path

import pytest
import torch

from tests.conftest import marked

PAGE = (Path(__file__).parents[2] / "docs" / "plain_torchrl.md").read_text("utf-8")


def rows_of_the_page() -> list[dict[str, float]]:
    lines = [line.split() for line in PAGE.splitlines() if line.startswith("    kl_ref ")]
    return [dict(zip(line[::2], map(float, line[1::2]), strict=True)) for line in lines]


def gaussian(mean, std, ref_mean, ref_std) -> torch.Tensor:
    """KL of two diagonal Gaussians, per frame."""
    ratio = (std / ref_std) ** 2
    return ((ratio + ((mean - ref_mean) / ref_std) ** 2 - 1 - ratio.log()) / 2).sum(-1)


@pytest.mark.integration
@pytest.mark.parametrize("mode", marked("slow", ("legacy", "retrieve"), "legacy"))
def test_the_pages_file_prints_the_kl_of_its_policies(mode: str) -> None:
    code = re.findall(r"^    # plain\.py\n(?:    .*\n|\n)+", PAGE, re.MULTILINE)[0]
    mine: dict = {"__name__": "plain"}
    exec(compile(textwrap.dedent(code), "plain.py", "exec"), mine)
    torch.set_default_dtype(torch.float32)
    printed, beta = rows_of_the_page(), 1.0
    for i, (row, batch, policy, reference) in enumerate(mine["train"](mode, 0.5, iterations=2)):
        old, action, after = (batch["loc"], batch["scale"]), batch["action"], batch["next"]
        with torch.no_grad():
            new, ref = (p(batch.select("observation")) for p in (policy, reference))
        exact = gaussian(*old, ref["loc"], ref["scale"])
        k1 = torch.distributions.Normal(*old).log_prob(action)
        k1 = k1 - torch.distributions.Normal(ref["loc"], ref["scale"]).log_prob(action)
        torch.testing.assert_close(row["kl_ref"], exact.mean(), atol=1e-6, rtol=1e-4)
        torch.testing.assert_close(after["kl"], k1, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(after["reward"], after["raw"] - 0.5 * k1, atol=1e-5, rtol=1e-6)
        kl_old = gaussian(*old, new["loc"], new["scale"]).mean()
        torch.testing.assert_close(row["kl_old"], kl_old, atol=1e-6, rtol=1e-4)
        assert row["beta"] == beta
        beta *= 2 if kl_old > 0.015 else 0.5 if kl_old < 0.01 / 1.5 else 1
        assert set(row) == set(printed[i])
        assert i == 0 or 0 < exact.mean() != k1.mean()
        if i == 0:  # before the coefficient matters
            assert all(abs(float(row[key]) - printed[0][key]) < 2e-2 for key in row)
