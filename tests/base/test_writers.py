"""Which lines of klrl/ write files: those of ``klrl/base/files.py``, and no others."""

import ast
from collections.abc import Iterator
from pathlib import Path

import klrl

ROOM = Path(klrl.__file__).parent
WRITER = "base/files.py"
#: What opens or writes a file, whatever it is called on.
_METHODS = {
    *("write_text", "write_bytes", "touch", "savetxt", "tofile", "savez", "copyfile", "copy2"),
    *("copytree", "save_file", "mkstemp", "fdopen", "hardlink_to", "symlink_to"),
}
#: Likewise, where these modules own it.
_OF_MODULES = {
    "np": {"save"},
    "torch": {"save"},
    "os": {"open", "link", "symlink"},
    "shutil": {"copy", "move"},
    "json": {"dump"},
    "pickle": {"dump"},
    "yaml": {"dump"},
}
#: What writes elsewhere, how often, and why it may.
ALLOWED = {
    ("base/streams.py", "os.open"): (2, "/dev/null in place of a closed stream"),
    ("base/errors.py", "os.open"): (1, "the current folder, to return to it"),
    ("base/streams.py", "open"): (1, "a descriptor that is open"),
    ("language/run/export.py", "shutil.copyfile"): (2, "into the new folder of replacing()"),
    ("language/run/export.py", "write_text"): (1, "the model card, into the same folder"),
}


def writes(tree: ast.AST) -> Iterator[str]:
    """The calls that may write a file."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        function = node.func
        name = getattr(function, "attr", getattr(function, "id", ""))
        owner = getattr(getattr(function, "value", None), "id", "")
        told = f"{owner}.{name}".lstrip(".")
        opens = name == "open" and owner != "os" and not _reads(node)
        if opens or name in _METHODS or name in _OF_MODULES.get(owner, ()):
            yield told


def _reads(call: ast.Call) -> bool:
    """Whether a call of an ``open`` has a mode that only reads; of one that opens no file, too."""
    given = [*call.args, *(each.value for each in call.keywords if each.arg == "mode")]
    modes = [each.value for each in given if isinstance(each, ast.Constant)]
    if isinstance(call.func, ast.Name):
        return len(given) < 2 or (bool(modes) and not set("wax+") & set(str(modes[-1])))
    return not any(isinstance(each, str) and set("wax+") & set(each) for each in modes)


def test_one_module_writes_files() -> None:
    found: dict[tuple[str, str], int] = {}
    for path in sorted(ROOM.rglob("*.py")):
        name = path.relative_to(ROOM).as_posix()
        for call in writes(ast.parse(path.read_text(encoding="utf-8"))):
            if name != WRITER:
                found[name, call] = found.get((name, call), 0) + 1
    assert found == {key: count for key, (count, _) in ALLOWED.items()}
