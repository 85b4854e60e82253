"""Readers of files that may be a stranger's: each is listed, and none can unpickle or run code."""

import ast
import re
from pathlib import Path

import klrl

PACKAGE = Path(klrl.__file__).parent

#: The call of a library's reader -> the arguments that keep it from running code, and the reason.
READERS: dict[str, tuple[set[str], str]] = {
    "json.loads": (set(), "JSON has no code"),
    "super().load_config": (set(), "Hydra's YAML, of plain values"),
    "yaml.load": ({"LOADER"}, "klrl.base.tables: LOADER is a SafeLoader"),
    "yaml.safe_load": (set(), "a SafeLoader"),
    "safe_open": (set(), "safetensors have no code"),
    "TensorDict.load_memmap": ({"allow_pickle=False"}, "else unpickles other.pickle"),
    "datasets.load_from_disk": (set(), "Arrow tables and JSON"),
    "datasets.load_dataset": (set(), "reads by ending: no scripts since 4, no pickles in a .tar"),
    "AutoConfig.from_pretrained": ({"trust_remote_code=False"}, "else imports auto_map"),
    "kind.from_pretrained": ({"trust_remote_code=False", "local_files_only=True"}, "else auto_map"),
    "AutoTokenizer.from_pretrained": ({"gguf_file=GGUF"}, "an installed package's GGUF file"),
    "AutoModelForCausalLM.from_pretrained": (
        {"gguf_file=GGUF"},
        "an installed package's GGUF file",
    ),
}
#: Modules that can unpickle or run what they read -> the files that may import them, and what.
CAN_RUN = {
    "pickle": {"config/own/trial.py": {"Pickler", "PicklingError"}},
    "joblib": {"sweep/launchers.py": {"Parallel", "delayed", "TerminatedWorkerError"}},
}
DANGEROUS = re.compile(
    r"^(pickle|cPickle|_pickle|cloudpickle|dill|joblib|marshal|shelve|h5py|jsonpickle)(\.|$)"
)
READS = re.compile(
    r"(?i)(^|_)loads?($|_)|^safe_open$|^from_(pretrained|disk|file|buffer|url|json)|fromfile"
    r"|^read_(parquet|pickle|csv|json|orc|feather|hdf)|memmap|unpickl|^(eval|exec)$"
)
#: Methods of klrl's own classes, and of torch's and TorchRL's, that read no file.
METHODS = {"load_state_dict", "load_last", "_load", "memmap", "eval"}


def _used() -> dict[str, list[tuple[str, ast.Call | None]]]:
    """Readers that are named or called, without klrl's own functions: (file, call)."""
    found: dict[str, list[tuple[str, ast.Call | None]]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        nodes, where = list(ast.walk(ast.parse(path.read_text("utf-8")))), path.relative_to(PACKAGE)
        own = {node.arg for node in nodes if isinstance(node, ast.arg)}
        for node in nodes:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                own.add(node.name)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                own.add(node.id)
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("klrl"):
                own |= {each.asname or each.name for each in node.names}
        calls = {id(node.func): node for node in nodes if isinstance(node, ast.Call)}
        for node in nodes:
            if isinstance(node, ast.Attribute):
                name, known = node.attr, METHODS
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                name, known = node.id, own
            else:
                continue
            if READS.search(name) and name not in known:
                told = (where.as_posix(), calls.get(id(node)))
                found.setdefault(ast.unparse(node), []).append(told)
    return found


def _given(call: ast.Call | None, where: str) -> set[str]:
    """The arguments of a call, as text; those of ``**how`` from the dictionary of that name."""
    if call is None:
        return set()
    tree = ast.parse((PACKAGE / where).read_text("utf-8"))
    found = {f"{k.arg}={ast.unparse(k.value)}" for k in call.keywords if k.arg}
    named = {ast.unparse(k.value) for k in call.keywords if not k.arg}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in named:
            assert isinstance(node.value, ast.Dict)
            for key, value in zip(node.value.keys, node.value.values, strict=True):
                assert isinstance(key, ast.Constant)
                found.add(f"{key.value}={ast.unparse(value)}")
    return found | {ast.unparse(each) for each in call.args}


def test_each_reader_is_listed_and_has_what_keeps_it_from_running_code() -> None:
    used = _used()
    assert set(used) == set(READERS), "list the new reader, with the reason why it runs no code"
    for name, (needed, _) in READERS.items():
        for where, call in used[name]:
            given = _given(call, where)
            weights = {"use_safetensors=True"} if "dtype=dtype" in given else set()
            assert needed | weights <= given, f"{where}: {name} lacks {needed | weights - given}"


def test_no_file_imports_what_can_unpickle() -> None:
    for path in sorted(PACKAGE.rglob("*.py")):
        where = path.relative_to(PACKAGE).as_posix()
        text = path.read_text("utf-8")
        for node in ast.walk(ast.parse(text)):
            modules = [each.name for each in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                modules = [str(node.module)]
            for module in filter(DANGEROUS.match, modules):
                top = module.partition(".")[0]
                allowed = CAN_RUN.get(top, {}).get(where)
                assert allowed, f"{where} imports {module}, which can run code that it reads"
                names = {each.name for each in node.names} - {module}
                names |= set(re.findall(rf"\b{top}\.(\w+)", text)) - {"externals"}
                assert names <= allowed, f"{where} uses {names - allowed} of {module}"
