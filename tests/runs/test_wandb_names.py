"""What a wandb run is called, and that the page's sweep starts jobs that compose."""

import re
from pathlib import Path

import pytest
import yaml

from klrl.config.compose import job_config
from klrl.config.overrides import parse_args
from klrl.runs.wandb_logger import choices_of, run_name

PAGE = Path(__file__).parents[2] / "docs" / "wandb.md"


@pytest.mark.parametrize(
    ("words", "swept", "name"),
    [
        ("env=pendulum kl.coef=0.1", "", "pendulum-klpen-kl0.1-s0"),
        ("env=pendulum kl=none seed=3", "", "pendulum-klpen-s3"),
        ("env=half_cheetah kl.coef=1", "kl.coef=1,seed=0", "halfcheetah-trpo-kl1-s0"),
        (
            "env=pendulum loss=clip optim.lr=0.01",
            "loss=clip,optim.lr=0.01,seed=0",
            "pendulum-clip-kl0.1-s0-optim.lr=0.01",
        ),
        ("experiment=sort_digits", "", "sort_digits-clip-kl0.1-s0"),
    ],
)
def test_a_name_is_made_of_choices(words: str, swept: str, name: str) -> None:
    settings = vars_of(words)
    assert run_name(settings, swept) == name
    assert choices_of(settings)[:2] == name.split("-")[:2]


def vars_of(words: str) -> dict:
    from dataclasses import asdict

    return asdict(job_config(parse_args(words.split()).overrides))


def test_the_sweep_of_the_page_starts_jobs_that_compose() -> None:
    from wandb.sdk.launch.sweeps.utils import create_sweep_command, create_sweep_command_args

    (text,) = re.findall(r"```yaml\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    sweep = yaml.safe_load(text)
    assert sweep["metric"]["name"] == "eval/return"
    for loss in sweep["parameters"]["loss"]["values"]:
        drawn = {"kl.coef": 0.037, "loss": loss, "seed": sweep["parameters"]["seed"]["values"][-1]}
        assert drawn.keys() == sweep["parameters"].keys()
        told = create_sweep_command_args({"args": {k: {"value": v} for k, v in drawn.items()}})
        words = []
        for each in create_sweep_command(sweep["command"]):
            words += told[each[2:-1]] if each.startswith("${") else [each]
        assert words.pop(0) == "klrl"
        job = job_config(parse_args(words).overrides)
        assert (job.loss.name, job.kl.coef, job.seed, job.env.id) == (loss, 0.037, 2, "Pendulum-v1")
        assert job.logger.project == "mine"
