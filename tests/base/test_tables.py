"""A wrong entry of klrl's own tables is a line that names file and entry, never a traceback."""

import re
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import klrl
from klrl.base.errors import ConfigError
from klrl.base.tables import entry_of, read_table
from klrl.runs import metrics

HERE = Path(klrl.__file__).parent


@dataclass(frozen=True)
class Row:
    name: str
    what: str
    digits: int | None = 4
    shown: bool = False
    where: dict[str, list[object]] = field(default_factory=dict)


def test_a_row_is_its_entry() -> None:
    entry = {"name": "a", "what": "b", "digits": None, "where": {"x": [1]}}
    assert entry_of(Row, Path("t.yaml"), entry) == Row("a", "b", None, where={"x": [1]})


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"name": "a", "wat": "b"}, "wat.* unexpected keyword argument 'wat'"),
        ({"name": "a"}, "name.* missing 1 required positional argument: 'what'"),
    ],
)
def test_a_wrong_entry_is_named(entry: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=f"^t.yaml: .*{words}"):
        entry_of(Row, Path("t.yaml"), entry)


def test_a_broken_table_is_named(tmp_path) -> None:
    path = tmp_path / "t.yaml"
    path.write_text("- {a: [}\n")
    with pytest.raises(ConfigError, match=r"t\.yaml: is broken \(.*line 1"):
        read_table(path)
    path.write_text("both: []\nconrol: []\n")
    with pytest.raises(ConfigError, match=r"t\.yaml: has both, conrol; expected both, control"):
        read_table(path, "both", "control")


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("panel: speed", "panle: speed", "unexpected keyword argument 'panle'"),
        ("panel: speed", "panel: sped", "panel=sped: choose score or kl or coefficient"),
        ("name: policy/gap", "name: policy/entropy", "policy/entropy: is declared twice"),
        ('unit: "nats per {unit}"', 'unit: "nats per {unt}"', "has no term 'unt'"),
    ],
)
def test_a_wrong_metric_is_named(tmp_path, monkeypatch, old, new, says) -> None:
    text = metrics._TABLE.read_text("utf-8")
    assert old in text
    monkeypatch.setattr(metrics, "_TABLE", tmp_path / "metrics.yaml")
    metrics._TABLE.write_text(text.replace(old, new, 1), "utf-8")
    with pytest.raises(ConfigError, match=rf"^metrics\.yaml: .*{re.escape(says)}"):
        metrics._declared()
