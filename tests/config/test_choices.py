"""The registry cannot lie: a choice is declared, wired and described, or it is none."""

import dataclasses
import inspect
import pickle
import re
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

import pytest

from klrl.base.errors import ConfigError
from klrl.config import (
    ALL_CHOICES,
    CHOICES,
    CONTROL,
    LANGUAGE,
    ClipConfig,
    KLPENConfig,
    LossConfig,
    OptimConfig,
    SamplerConfig,
    choice_of,
    choices_for,
    conf_dir,
    factory,
    schemas,
    sweep,
)
from klrl.config.checks import checked, to_config, typed_choice
from klrl.config.choices import Choice, registered, resolve
from klrl.config.compose import Composer, _composed, compose, job_config
from klrl.config.fields import ChoiceConfig, Natural, Positive, setting
from klrl.config.given import Given
from klrl.config.identity import canonical, settings_hash
from klrl.config.nodes import notes_of, register_schemas
from klrl.config.overrides import parse
from klrl.losses.policy import ClipLoss
from tests.conftest import QUICK
from tests.runs.commands import exits

EVERY = [(group, name) for group, known in ALL_CHOICES.items() for name in known]


def schemas_of(*modules: object) -> set[type[ChoiceConfig]]:
    """The dataclasses of choices that a module of ``klrl.config`` declares."""
    return {
        value
        for module in modules
        for value in vars(module).values()
        if inspect.isclass(value) and issubclass(value, ChoiceConfig) and value is not ChoiceConfig
    }


@pytest.mark.parametrize(("group", "name"), EVERY)
def test_every_choice_has_factories_that_can_be_imported(group: str, name: str) -> None:
    factories = choice_of(group, name).factories
    assert factories, f"{group}={name}: a schema without a factory"
    for domain, path in factories.items():
        assert callable(resolve(path)), f"{group}={name}, {domain}: {path}"


def test_every_schema_belongs_to_a_choice() -> None:
    """But for those that only others are derived from."""
    parts = [import_module(f"{schemas.__name__}.{m.name}") for m in iter_modules(schemas.__path__)]
    assert len(parts) > 4
    declared = schemas_of(*parts, sweep)
    wired = {choice.schema for known in ALL_CHOICES.values() for choice in known.values()}
    bases = {base for schema in wired for base in schema.__mro__[1:]}
    assert declared - wired - bases == set(), "a schema without a choice, and so without a factory"


@pytest.mark.parametrize(("group", "name"), EVERY)
def test_every_setting_of_a_choice_says_what_it_does(group: str, name: str) -> None:
    choice = choice_of(group, name)
    assert choice.what
    lacking = {f.name for f in dataclasses.fields(choice.schema)} - notes_of(choice.schema).keys()
    assert lacking <= {"name", "source", "sources", "version", "lora"}


@pytest.mark.parametrize("group", ALL_CHOICES)
def test_every_yaml_is_a_preset_over_a_choice(group: str) -> None:
    for path in sorted((conf_dir() / group).glob("*.yaml")):
        base = re.search(rf"- (\w+)@{group}", path.read_text("utf-8"))
        assert base, f"{path}: a preset over no choice of {group}"
        assert base[1] in ALL_CHOICES[group] or (conf_dir() / group / f"{base[1]}.yaml").exists()


@pytest.mark.parametrize("group", CHOICES)
def test_every_domain_has_every_group(group: str) -> None:
    assert choices_for(group, CONTROL)
    assert choices_for(group, LANGUAGE)


def test_a_factory_of_another_domain_is_no_default() -> None:
    config = SamplerConfig(name="sampler")
    with pytest.raises(ConfigError, match=r"collector=sampler: control has no such choice.*vector"):
        factory("collector", config, CONTROL)
    with pytest.raises(ConfigError, match="loss.name=spo: is not registered"):
        factory("loss", LossConfig(name="spo"), CONTROL)


def register(monkeypatch, schema: type, factories: Mapping[str, str]) -> str:
    """A new choice of ``loss``, for one test."""
    name = f"new{len(factories)}{schema.__name__}"
    monkeypatch.setitem(ALL_CHOICES["loss"], name, Choice(schema, factories))
    register_schemas.__wrapped__()
    return f"loss={name}"


@dataclasses.dataclass
class Bare(ChoiceConfig):
    """A schema that is not derived from that of its group."""

    epsilon: Positive = 1.0


class ReadsMore(ClipLoss):
    """Reads a setting that its schema does not have."""

    def __init__(self, config, **given) -> None:
        super().__init__(config, **given)
        self.epsilon = config.epsilon


MORE = {CONTROL: f"{__name__}:ReadsMore"}
KLPEN = CHOICES["loss"]["klpen"].factories


@pytest.mark.parametrize(
    ("schema", "factories", "says"),
    [
        (Bare, KLPEN, "Bare: its schema Bare lacks settings that every loss has; derive "),
        (ClipConfig, MORE, "ClipConfig has no setting epsilon; declare it there"),
        (KLPENConfig, {CONTROL: "klrl.losses.no:No"}, "klrl/losses/no.py: has no No, which klrl/c"),
    ],
)
@pytest.mark.integration
def test_a_choice_that_is_registered_wrongly_is_answered_in_one_line(
    capsys, monkeypatch, schema: type, factories, says: str
) -> None:
    word = register(monkeypatch, schema, factories)
    # In a sweep before the first job runs.
    for words in ([word], [word.replace("=", "=klpen,"), "-m"]):
        if (schema, len(words)) == (ClipConfig, 2):  # what a class reads is seen when it runs
            break
        assert exits(*words[1:], *QUICK, words[0]) == 2
        said = capsys.readouterr()
        assert (said.out, len(said.err.splitlines())) == ("", 1), said
        assert says in said.err
        assert not any(Path("outputs").glob("*"))


def test_settings_that_name_no_choice_are_refused() -> None:
    with pytest.raises(ConfigError, match="advantage: its settings name no choice"):
        typed_choice("advantage", {"advantage": {"other": 1}})
    with pytest.raises(
        ConfigError, match="its stored settings are broken: actor.other: no such setting"
    ):
        typed_choice("actor", {"actor": {"name": "mlp", "other": 1}})
    with pytest.raises(ConfigError, match="env: nothing is chosen"):
        checked({"kl": {"name": "none"}})


def test_the_identity_is_over_settings_that_count() -> None:
    plain = job_config(["logger=none"])
    assert settings_hash(plain) == settings_hash(job_config(["logger=wandb", "logger.project=a"]))
    assert settings_hash(plain) != settings_hash(job_config(["logger=none", "seed=1"]))
    assert settings_hash(plain) == settings_hash(job_config(["loss.dtarg=0.01"]))
    assert settings_hash(job_config(["kl.coef=1"])) == settings_hash(job_config(["kl.coef=1.0"]))
    words = ["experiment=sort_digits", "collector.samples_every"]
    shown, unshown = (job_config([words[0], f"{words[1]}={n}"]) for n in (0, 5))
    assert settings_hash(shown) == settings_hash(unshown)


def test_a_setting_that_is_added_orphans_no_sweep(monkeypatch) -> None:

    @dataclasses.dataclass
    class Later(OptimConfig):
        warmup: Natural = setting(0, added=True)

    config = job_config([])
    before = canonical(config)
    adam = dataclasses.replace(CHOICES["optim"]["adam"], schema=Later)
    monkeypatch.setitem(CHOICES["optim"], "adam", adam)
    fields = {f.name: getattr(config.optim, f.name) for f in dataclasses.fields(config.optim)}
    config.optim = Later(**fields)
    assert canonical(config) == before
    config.optim.warmup = 3
    assert canonical(config)["optim"] == {**before["optim"], "warmup": 3}


def test_settings_that_were_changed_in_python_are_checked() -> None:
    config = job_config(["kl=retrieve"])
    checked(dataclasses.asdict(config))
    config.kl.coef = -1.0
    with pytest.raises(ConfigError, match=r"kl.coef=-1.0: give a number >= 0"):
        checked(dataclasses.asdict(config))
    config = job_config([])
    config.loss = KLPENConfig(**{**vars(config.loss), "name": "clip"})
    with pytest.raises(ConfigError, match="loss.dtarg: no such setting"):
        checked(dataclasses.asdict(config))
    config = job_config(["experiment=sort_digits"])
    config.collector = job_config([]).collector
    with pytest.raises(ConfigError, match=r"collector=vector: env=sort_digits is a language task"):
        checked(dataclasses.asdict(config))


def test_composing_once_and_merging_gives_what_hydra_gives() -> None:
    """Hydra composes each job anew; klrl merges the values into a copy of the choices' config."""
    _composed.cache_clear()
    composer = Composer()
    jobs = [
        ["env=hopper", "kl.coef=0.3", "seed=4"],
        ["env=hopper", "kl.coef=0.1", "++env.kwargs.healthy_reward=2.0", "frames=1e6"],
        ["env=hopper", "actor.hidden=[8,8]", "actor.init='runs/seed=${seed}'", "seed=7"],
        ["experiment=sort_digits", "actor.lora.r=4", "collector.samples_every=2"],
    ]
    for words in jobs:
        mine, hydras = (to_config(cfg) for cfg in (composer.composed(parse(words)), compose(words)))
        assert mine == hydras
    assert _composed.cache_info().misses == 2
    Composer().composed(parse(jobs[0]))
    assert _composed.cache_info().misses == 2, (
        "another command of this process composes nothing anew"
    )


def test_an_edited_choice_of_the_users_is_read_again(tmp_path: Path) -> None:
    choice = tmp_path / "env" / "mine.yaml"
    choice.parent.mkdir()
    for copies in (4, 9):
        choice.write_text(
            "# @package _global_\ndefaults:\n  - gym@env\n  - _self_\n"
            f"env: {{id: Pendulum-v1, num_envs: {copies}}}\n"
        )
        assert Composer(str(tmp_path)).composed(parse(["env=mine"])).env.num_envs == copies


@pytest.mark.parametrize(
    ("word", "parts"),
    [
        ("kl=legacy", ("choice", "kl", "legacy")),
        ("++kl=legacy", ("other", "kl", "legacy")),
        ("kl={coef: 2}", ("other", "kl", "{coef: 2}")),
        ("seed=1", ("value", "seed", "1")),
        ("env.kwargs.g='a=b'", ("value", "env.kwargs.g", "a=b")),
        ("+env.kwargs.g=1", ("other", "env.kwargs.g", "1")),
        ("~env.kwargs.g", ("other", "env.kwargs.g", "")),
    ],
)
def test_a_word_is_read_in_its_parts(word: str, parts: tuple[str, str, str]) -> None:
    given = Given(word)
    assert (given.kind, given.key, given.value) == parts
    assert Given(given) == given == pickle.loads(pickle.dumps(given))
    assert given.removeprefix("++") == word.removeprefix("++")


@pytest.mark.parametrize(
    "words",
    [
        ["kl.coef=0.5", "kl={coef: 2}"],
        ["kl={coef: 2}", "kl.coef=0.5"],
        ["++env.kwargs.g=1", "++env.kwargs.g=2", "~env.kwargs.g", "kl=legacy"],
        ["+env.kwargs.g=1", "++env.kwargs.g=2", "loss=clip"],
    ],
)
def test_the_order_of_words_counts_as_in_hydra(words: list[str]) -> None:
    assert to_config(Composer().composed(parse(words))) == to_config(compose(words))


@pytest.mark.parametrize(("group", "name"), [("losss", "mine"), ("loss", "clip")])
def test_a_choice_has_a_name_of_its_own_in_a_known_group(group: str, name: str) -> None:
    with pytest.raises(ConfigError, match=f"^@registered\\('{group}', '{name}'\\) of "):
        registered(group, name)(CHOICES["loss"]["clip"].schema)
