"""Prints ``installed`` if this Python has all that pip would install: installed.py -e .[NAME,...].

So ``make run`` needs no network after a change of pyproject.toml that adds no package: pip itself
would fetch the build's backend.
"""

import sys
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from pip._vendor.packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
NAME, EXTRAS = PROJECT["name"], PROJECT["optional-dependencies"]


def fits(text: str, missing: bool = False) -> bool:
    """Return whether a package has a version that a requirement allows; ``missing``: if absent."""
    wanted = Requirement(text)
    if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
        return True
    try:
        found = wanted.specifier.contains(version(wanted.name), prereleases=True)
    except PackageNotFoundError:
        return missing
    if wanted.name != NAME:
        return found
    more = [PROJECT["dependencies"], *(EXTRAS[each] for each in wanted.extras)]
    return found and all(fits(each) for part in more for each in part)


if __name__ == "__main__":
    words = [word for word in sys.argv[1:] if word == "-r" or not word.startswith("-")]
    constraints = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    kept = (fits(line, missing=True) for line in constraints if line and line[0] != "#")
    here = (fits(NAME + word[1:] if word[0] == "." else word) for word in words)
    if words and "-r" not in words and all(kept) and all(here):
        print("installed")
