"""A release names one version and date everywhere, and one address."""

import re
import runpy
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

import klrl

ROOT = Path(__file__).parent.parent


def test_package_changelog_and_citation_name_one_version_and_date() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text("utf-8")
    version, date = re.search(r"^## ([\d.]+), (.+)$", changelog, re.MULTILINE).groups()
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert klrl.__version__ == version + ".dev0" * (date == "in development")
    assert citation["version"] == klrl.__version__
    assert str(citation.get("date-released", "in development")) == date
    assert citation["license"] == project["license"]
    assert citation["keywords"] == project["keywords"]
    assert citation["authors"] == project["authors"]


def metadata(monkeypatch: pytest.MonkeyPatch, address: str) -> dict:
    """What .ci/metadata.py adds; the environment of the tests has no hatchling."""
    plugin = "hatchling.metadata.plugin.interface"
    for name in (plugin[: i.start()] for i in re.finditer(r"\.", plugin)):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace())
    monkeypatch.setitem(sys.modules, plugin, SimpleNamespace(MetadataHookInterface=object))
    hook = runpy.run_path(str(ROOT / ".ci/metadata.py"))["Metadata"]()
    hook.root, hook.config = str(ROOT), {"repository": address}
    hook.update(added := {})
    return added


def test_one_address_gives_all_urls_and_the_links_of_the_readme(monkeypatch) -> None:
    page = (ROOT / "README.md").read_text("utf-8")
    assert metadata(monkeypatch, "") == {"readme": {"content-type": "text/markdown", "text": page}}

    address = "https://example.org/klrl"
    added = metadata(monkeypatch, address + "/")
    assert added["urls"]["Repository"] == address
    assert all(url.startswith(address) for url in added["urls"].values())
    links, shown = (
        re.findall(r"(!?)\[[^]]*\]\(([^)]+)\)", text) for text in (page, added["readme"]["text"])
    )
    assert any(image for image, _ in links)
    for (image, link), (_, target) in zip(links, shown, strict=True):
        outside = link.startswith(("https:", "#"))
        place = "raw" if image else "blob"
        assert target == (link if outside else f"{address}/{place}/HEAD/{link}")
        assert outside or (ROOT / link.partition("#")[0]).exists()
