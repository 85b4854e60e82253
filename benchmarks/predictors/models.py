"""Heavier MuJoCo models: the changed tasks of hopper and half_cheetah."""

from __future__ import annotations

from pathlib import Path

#: Start with a dot: Gymnasium looks for any other relative path among its own models.
HEAVY = "./outputs/results/forgetting/hopper_heavy_torso.xml"
HEAVY_CHEETAH = "./outputs/predictors/half_cheetah_heavy.xml"
#: kg per cubic metre; MuJoCo's default, which Hopper's torso has, is 1000.
DENSITY = 2000
#: kg; Gymnasium's half_cheetah.xml has 14.
MASS = 28


def prepare_models() -> None:
    """Write the heavier models, from those that Gymnasium installed."""
    import gymnasium

    assets = Path(gymnasium.__file__).parent / "envs" / "mujoco" / "assets"
    for path, name, heavier in (
        (HEAVY, "hopper.xml", heavier_torso),
        (HEAVY_CHEETAH, "half_cheetah.xml", _heavier_cheetah),
    ):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        model = (assets / name).read_text(encoding="utf-8")
        Path(path).write_text(heavier(model), encoding="utf-8")


def heavier_torso(model: str) -> str:
    """Hopper's XML with the torso's density set to :data:`DENSITY`."""
    torso = 'name="torso_geom"'
    assert model.count(torso) == 1, "Gymnasium's hopper.xml is not the one that is known here"
    return model.replace(torso, f'{torso} density="{DENSITY}"')


def _heavier_cheetah(model: str) -> str:
    total = 'settotalmass="14"'
    assert model.count(total) == 1, "Gymnasium's half_cheetah.xml is not the one that is known here"
    return model.replace(total, f'settotalmass="{MASS}"')
