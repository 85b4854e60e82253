"""What MkDocs does not do by itself: generated pages, and Markdown as GitHub reads it."""

from __future__ import annotations

import posixpath
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
sys.path[:0] = [str(HERE), str(ROOT)]

from notebooks import notebook  # noqa: E402
from reference import pages  # noqa: E402

#: Files outside docs/ that have a page, and what else a link to one may lead to.
OUTSIDE = {
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "README.md": "index.md",
}
#: The extra of klrl that a tutorial's notebook installs.
EXTRAS = {"sb3_policy": "bench", "grpo_prompts": "language"}
_SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
REPOSITORY = _SETTINGS["tool"]["hatch"]["metadata"]["hooks"]["custom"]["repository"].rstrip("/")


def on_files(files: Files, config: Any) -> Files:
    """Add the generated pages and notebooks."""
    made = pages()
    for name, page in OUTSIDE.items():
        if page != "index.md":
            text = (ROOT / name).read_text("utf-8")
            made[page] = re.sub(r"\]\(docs/", "](", text)
    for path in (ROOT / "docs" / "tutorials").glob("*.md"):
        text = path.read_text("utf-8")
        made[f"tutorials/{path.stem}.ipynb"] = notebook(text, EXTRAS.get(path.stem, "sweeps"))
    for name, text in made.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Read a page as GitHub does; lead links that leave the site to the repository."""
    source = page.file.src_uri
    if source.startswith("tutorials/"):
        name = posixpath.basename(source).removesuffix(".md")
        markdown = re.sub(
            r"^(# .*\n)",
            rf"\1\n[:material-download: As a notebook]({name}.ipynb)\n",
            markdown,
            count=1,
        )
    folder = posixpath.dirname(source)

    def led(link: re.Match[str]) -> str:
        picture, text, target, anchor = link.groups()
        path = posixpath.normpath(posixpath.join(folder, target))
        if files.get_file_from_path(path) or files.get_file_from_path(f"{path}/README.md"):
            return link[0]
        name = path.removeprefix("../") if path.startswith("../") else f"docs/{path}"
        if source in OUTSIDE.values() and (ROOT / path).exists():
            name = path
        if not (ROOT / name).exists():
            return link[0]  # a broken link, which MkDocs reports
        if page_ := OUTSIDE.get(name):
            up = posixpath.relpath(page_, folder or ".")
            return f"[{text}]({up}{anchor or ''})"
        return f"{picture}[{text}]({REPOSITORY}/blob/HEAD/{name})" if REPOSITORY else text

    kept = []
    for block in re.split(r"(^```.*?^```\n)", markdown, flags=re.DOTALL | re.MULTILINE):
        text = block
        if not block.startswith("```"):
            text = re.sub(
                r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?!\w+:|#)([^)#\s]+)(#[^)]*)?\)", led, text
            )
            # A list needs no empty line before it, and a bar in code its escape only in a table.
            text = re.sub(
                r"(?m)^(?! *(?:[-*]|\d+\.) | {4}|\||#|$)(.*\n)(?=(?:-|1\.) )", r"\1\n", text
            )
            text = re.sub(r"`[^`\n]*`", lambda code: code[0].replace("\\|", "|"), text)
        kept.append(text)
    return "".join(kept)


def on_page_content(html: str, **_: Any) -> str:
    """Drop Sphinx's roles from docstrings: the name is code already."""
    return re.sub(r":(?:py:)?(?:class|func|meth|mod|data|attr|obj|exc):(?=<code)", "", html)
