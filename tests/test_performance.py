"""docs/performance.md recomputed from committed files; ``python -m tests.test_performance``."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import results

MACHINE = json.loads((results.FOLDER / "amd-epyc-2-cores.json").read_text("utf-8"))
GPU, ANOTHER = (
    json.loads((results.FOLDER / f"gpu{name}.json").read_text("utf-8")) for name in ("", "-another")
)
SMALL, LARGE, LEANRL, PRESET = (
    *("Pendulum 8 x 256, 64-64", "HalfCheetah 64 x 64, 1024-1024", "HalfCheetah 1 x 2,048, 64-64"),
    "HalfCheetah's preset (trpo)",
)

PEERS = ("klrl package", "Stable-Baselines3", "JAX")


def numbers() -> dict[str, str]:
    """What a number is -> how the page tells it."""
    found = {}
    speed = GPU["frames_per_second"]
    for name in (SMALL, LARGE, LEANRL, PRESET):
        eager, captured = (speed[f"{name}, {how}"] for how in ("eager", "captured"))
        found[f"H100, {name}"] = f"| {eager:,} | {captured:,} |"
    other = [ANOTHER["frames_per_second"][f"{x}, captured"] for x in (SMALL, LEANRL, LARGE)]
    found["another H100"] = "gave {:,}, {:,} and {:,}".format(*other)
    wide = sorted(file["frames_per_second"][f"{LARGE}, captured"] for file in (GPU, ANOTHER))
    found["1,024 wide, two H100s"] = "{:,} to {:,}".format(*wide)
    widths = MACHINE["widths"]["us"].values()
    found["us of a core by width"] = "{:.0f}, {:.0f}, {:.0f} and {:.0f} us a frame".format(*widths)
    small = sorted(1e6 / file["frames_per_second"][f"{SMALL}, captured"] for file in (GPU, ANOTHER))
    found["us of an H100, 64 wide"] = "H100s {:.0f} to {:.0f} for 64 wide".format(*small)
    passed = sum(check["status"] == "ok" for check in GPU["checks"])
    found["checks on the H100"] = f"passes its {passed} checks"
    for name, column, title in (
        (SMALL, "Pendulum-v1, 8 x 256", "pendulum"),
        (LEANRL, "HalfCheetah-v5, 1 x 2048", "half_cheetah"),
    ):
        core = results.idle(MACHINE, column)["contenders"]["klrl kernel"]["frames_per_cpu_second"]
        share = speed[f"{name}, captured"] / core["median"]
        found[f"H100 / CPU core, {title}"] = f"{share:.2f} ({title} "
    columns = [*results.CONTROL.values()][:4]
    other = [MACHINE["idle"][column]["contenders"] for column in columns]
    cost = [[results.us({"contenders": x}, name) for name in PEERS] for x in other]
    costs = "cost klrl {:.1f}, Stable-Baselines3 {:.0f} and JAX {:.1f}, and the".format(*cost[0])
    ratios = [f"{sb3 / klrl:.2f}" for klrl, sb3, _ in cost]
    found["another core"] = f"{costs} four ratios were {', '.join(ratios[:3])} and {ratios[3]}."
    wide = MACHINE["throughput"]["Pendulum-v1, 8 x 256, 1,024 wide"]
    at = [results.us(wide, name) for name in ("klrl kernel", "klrl eager", "Stable-Baselines3")]
    told = "costs {:,.0f} in the kernel, {:,.0f} eagerly, and Stable-Baselines3 {:,.0f}."
    found["1,024 wide on a core"] = told.format(*at)
    return found


def page() -> str:
    return " ".join(results.SUMMARY.read_text("utf-8").split())


@pytest.mark.parametrize("what", numbers())
def test_the_page_tells_the_number_of_the_file(what: str) -> None:
    assert numbers()[what] in page()


@pytest.mark.parametrize(("page", "start", "make"), results.tables())
def test_the_tables_are_those_of_the_file(page: Path, start: str, make: Callable) -> None:
    made = results.page_of(page, start, make(MACHINE))
    assert page.read_text("utf-8") == made, "python -m benchmarks.results writes it"


def test_the_readme_tells_the_tables_ratios() -> None:
    (row,) = [x for x in results.control(MACHINE).splitlines() if " / klrl kernel" in x]
    of = [float(cell) for cell in row.split("|")[2:-1]]
    readme = " ".join((results.ROOT / "README.md").read_text("utf-8").split())
    pendulum, _, hopper, cartpole = of[:4]
    told = f"{pendulum:.1f} times Stable-Baselines3 on Pendulum, {hopper:.1f} on Hopper, "
    assert told + f"{cartpole:.1f} on CartPole" in readme


def test_loaded_rounds_do_not_reach_the_page() -> None:
    column = "Hopper-v5, 8 x 256"
    cells = {**MACHINE["idle"][column], "load": [0.5, 2.4, 2]}
    cells["contenders"] = {"klrl kernel": {"frames_per_cpu_second": {"median": 1e6 / 77.7}}}
    loaded = results.control({**MACHINE, "throughput": {column: cells}})
    assert "77.7" not in loaded
    idle = {column: {**cells, "load": [0.5, 2.0, 2]}}
    assert "77.7" in results.control({**MACHINE, "throughput": idle})


def test_only_what_was_measured_has_a_column() -> None:
    title, name = "pendulum, other rounds", results.CONTROL["pendulum, other rounds"]
    speed = {"frames_per_cpu_second": {"median": 1e6 / 432}}
    cells = {"contenders": {"skrl": speed}, "load": [0.5, 2.0, 2]}
    whole = {**MACHINE, "throughput": {**MACHINE["throughput"], name: cells}}
    assert f" {title} |" in results.control(whole)
    assert "| skrl |  |  |  |  | 432 |" in results.control(whole)
    whole["throughput"][name] = {**cells, "load": [0.5, 2.1, 2]}
    assert title not in results.control(whole)


if __name__ == "__main__":
    for what, told in numbers().items():
        print(f"{'ok' if told in page() else 'NOT ON THE PAGE'}  {what}: {told}")
