"""Adds what follows from the repository's address to klrl's metadata; hatchling calls it.

The address is ``repository`` in pyproject.toml, its only place. An index shows the README without
the repository, so there its relative links become absolute.
"""

import re
from pathlib import Path

from hatchling.metadata.plugin.interface import MetadataHookInterface


class Metadata(MetadataHookInterface):
    """The project's URLs, and its README."""

    def update(self, metadata: dict) -> None:
        """Set ``urls`` and ``readme``; without an address no URL, and the README as it is."""
        text = (Path(self.root) / "README.md").read_text("utf-8")
        if address := self.config["repository"].rstrip("/"):
            metadata["urls"] = {
                "Repository": address,
                "Documentation": f"{address}/tree/HEAD/docs",
                "Changelog": f"{address}/blob/HEAD/CHANGELOG.md",
                "Issues": f"{address}/issues",
            }
            text = re.sub(r"(!\[[^]]*\]\()(?![a-z]+:|#)", rf"\1{address}/raw/HEAD/", text)
            text = re.sub(r"(\]\()(?![a-z]+:|#)", rf"\1{address}/blob/HEAD/", text)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
