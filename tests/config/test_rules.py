"""A rule about settings that nobody asks refuses nothing: none is forgotten, none is misspelt."""

from importlib import import_module
from inspect import getmembers, isfunction
from pkgutil import iter_modules
from typing import Literal, get_args, get_origin, get_type_hints

import pytest

from klrl.config import ALL_CHOICES, GROUPS, JOBS, rules
from klrl.config.compose import job_config
from klrl.config.explain import settings
from klrl.config.rules.unread import UNREAD

#: These ask the command line too, and ``compose`` asks them.
TYPED = {"unread"}
FILES = sorted({each.name for each in iter_modules(rules.__path__)} - TYPED)
ENTROPY = "loss.samples_mc_entropy"
KEYS = sorted({key for rules in UNREAD.values() for rule in rules for key in rule.keys.split()})


@pytest.mark.parametrize("file", FILES)
def test_every_check_of_a_file_is_made(file) -> None:
    module = import_module(f"{rules.__name__}.{file}")
    listed = {check for domain in JOBS for check in rules.rules_of(domain)}
    own = {f for _, f in getmembers(module, isfunction) if f.__module__ == module.__name__}
    assert len(own) > 3
    assert own <= listed


@pytest.mark.parametrize("key", KEYS)
def test_a_setting_that_is_never_read_is_a_setting(key) -> None:
    nested = [name for name in settings() if name.startswith(f"{key}.")]
    assert key in settings() or key in GROUPS or nested


@pytest.mark.parametrize("distribution", ["tanh_normal", "normal"])
def test_a_tanh_normals_entropy_is_sampled_whatever_its_network(distribution, settings) -> None:
    for actor in ([f"actor={distribution}"], ["actor=custom", "actor.target=torch.nn:Linear"]):
        if len(actor) > 1:
            actor.append(f"actor.distribution={distribution}")
        config = settings(*actor)
        refused = [r for r in UNREAD["control"] if r.keys == ENTROPY and r.applies(config)]
        assert bool(refused) == (distribution == "normal"), actor


def test_a_presets_setting_that_its_job_does_not_read_can_be_deleted() -> None:
    """Others than env.kwargs are defaults, which the words after a preset may make unread."""
    text = ["actor.model=somewhere", "data=rows.jsonl"]
    assert job_config(["experiment=sft", *text, "env.eval_data=x", "eval.every=0"]).eval.on is False
    assert job_config(["optim.rate=kl_adaptive"]).optim.lr_floor == 1e-4


def test_a_condition_names_settings_and_values_that_there_are() -> None:
    rules_of_both = [rule for rules in UNREAD.values() for rule in rules]
    asked = [each for rule in rules_of_both for each in ({**rule.where}, {**rule.unless})]
    for key, values in [item for each in asked for item in each.items()]:
        group, _, name = key.partition(".")
        if name == "name":
            assert {*values} <= {*ALL_CHOICES[group]}, key
        elif key != "eval.on":  # found out
            assert key in settings()
            schemas = [choice.schema for choice in ALL_CHOICES.get(group, {}).values()]
            hints = [get_type_hints(schema).get(name) for schema in schemas]
            allowed = {each for hint in hints for each in get_args(hint)}
            assert not any(get_origin(each) is Literal for each in hints) or {*values} <= allowed
