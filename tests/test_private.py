"""Private names of other libraries that klrl uses: each with its reason and the release it is for.

A method of klrl that overrides a private one is not counted, nor is a call to it.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import klrl

PACKAGE = Path(klrl.__file__).parent
CONSTRAINTS = PACKAGE.parent / "constraints.txt"

#: Private by their spelling, but documented by Python or IPython.
PUBLIC = {"_replace", "_asdict", "_getframe", "_exit", "_repr_png_"}

#: File, names, library with the last release for which this was decided, reason.
USES = (
    (
        "base/cache.py",
        "torch._inductor.runtime.cache_dir_utils.default_cache_dir",
        "torch 2.13",
        "importing torch sets the variable to this folder; klrl keeps any other value",
    ),
    (
        "base/ray_start.py",
        "ray._private.ray_constants",
        "ray 2.60",
        "Ray reads the variable once, when it is imported, and then leaves the loopback address",
    ),
    (
        "sweep/cluster.py",
        "ray._private.worker",
        "ray 2.60",
        "no setting stops the paragraph that Ray prints for each process that dies",
    ),
    (
        "config/compose.py",
        "hydra._internal.core_plugins.file_config_source.FileConfigSource _normalize_file_name",
        "hydra-core 1.3",
        "sources are public, but not Hydra's own for files, whose loading has no limit",
    ),
    (
        "control/env/classic_batch.py",
        "_sutton_barto_reward",
        "gymnasium 1.4",
        "CartPole publishes no such argument; without this name its copies are stepped one by one",
    ),
    (
        "control/env/simulators.py",
        "_max_episode_steps",
        "gymnasium 1.4",
        "TimeLimit shows its limit only in its spec, and a custom environment may have none",
    ),
    (
        "control/env/mujoco_batch.py",
        "_ctrl_cost_weight _forward_reward_weight _healthy_angle_range _healthy_reward "
        "_healthy_state_range _healthy_z_range _reward_control_weight _reward_dist_weight "
        "_terminate_when_unhealthy",
        "gymnasium 1.4",
        "tasks publish no weights; without one of these names the copies are stepped one by one",
    ),
    (
        "control/run/compiled.py",
        "torch._inductor.aoti_compile_and_package",
        "torch 2.13",
        "the only API for compiling ahead of time; torch documents it under this name",
    ),
    (
        "control/run/compiled.py",
        "_C _aoti",
        "torch 2.13",
        "torch._inductor's loader makes trees of the arguments in each call",
    ),
    (
        "envs/transforms/base.py",
        "_container _parent _torchrl_native_autoreset",
        "torchrl 0.14",
        "the property parent fails in a nested Compose; tests/transforms/test_places.py",
    ),
    (
        "kl/coefficient.py",
        "_buffers",
        "torch 2.13",
        "__setattr__ is overridden, and register_buffer refuses a name that is taken",
    ),
    (
        "kl/estimators.py",
        "_sparse_mask",
        "torchrl 0.14",
        "a masked categorical does not publish which actions its logits are of (_mask)",
    ),
    (
        "language/model/causal_lm.py",
        "_attn_implementation",
        "transformers 5.23",
        "a config has no public name for the attention that was chosen",
    ),
    (
        "language/model/causal_lm.py",
        "_modules",
        "torch 2.13",
        "a shallow copy shares its children's dict; a public setter would change the original",
    ),
    (
        "language/run/memory.py",
        "torch._subclasses.fake_tensor.FakeTensorMode "
        "torch.utils._python_dispatch.TorchDispatchMode",
        "torch 2.13",
        "torch documents fake tensors and dispatch modes under these names alone",
    ),
    (
        "objectives/ppo.py",
        "_has_critic _reduce_loss",
        "torchrl 0.14",
        "PPOLoss does not publish whether it has a critic, nor how it reduces",
    ),
    (
        "runs/state.py",
        "_metadata",
        "torch 2.13",
        "a state_dict keeps the versions of its modules there; load_state_dict reads them",
    ),
)


def is_private(name: str) -> bool:
    return any(re.fullmatch(r"_+[^_].*(?<!__)", part) for part in name.split("."))


def defined(tree: ast.AST) -> Iterator[str]:
    """Attributes that a source defines: in a class's body, or on ``self`` or ``cls``."""
    for node in ast.walk(tree):
        match node:
            case ast.ClassDef():
                for part in node.body:
                    match part:
                        case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                            yield name
                        case ast.AnnAssign(target=ast.Name(id=name)):
                            yield name
                        case ast.Assign(targets=[ast.Name(id=name)]):
                            yield name
            case ast.Attribute(value=ast.Name(id="self" | "cls"), ctx=ast.Store()):
                yield node.attr


def used(tree: ast.AST) -> Iterator[object]:
    """What a source imports from other packages, and attributes it reads or sets in any object."""
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module=str(module)) if module.split(".")[0] != "klrl":
                yield from (f"{module}.{alias.name}" for alias in node.names)
            case ast.Import():
                yield from (alias.name for alias in node.names)
            case ast.Attribute():
                yield node.attr
            case ast.Call(
                func=ast.Name(id="getattr" | "setattr" | "hasattr" | "delattr"),
                args=[_, ast.Constant(value=name), *_],
            ):
                yield name
            case (
                ast.Call(
                    func=ast.Attribute(value=ast.Attribute(attr="__dict__")),
                    args=[ast.Constant(value=name), *_],
                )
                | ast.Subscript(
                    value=ast.Attribute(attr="__dict__"), slice=ast.Constant(value=name)
                )
            ):
                yield name


def private_uses(sources: dict[str, str]) -> set[tuple[str, str]]:
    """Files and private names that no class in ``sources`` defines."""
    trees = {file: ast.parse(source) for file, source in sources.items()}
    known = PUBLIC.union(*map(defined, trees.values()))
    return {
        (file, name)
        for file, tree in trees.items()
        for name in used(tree)
        if isinstance(name, str) and is_private(name) and name not in known
    }


def test_private_names_of_other_libraries_are_those_of_the_list() -> None:
    paths = sorted(PACKAGE.rglob("*.py"))
    found = private_uses({p.relative_to(PACKAGE).as_posix(): p.read_text("utf-8") for p in paths})
    listed = {(file, name) for file, names, *_ in USES for name in names.split()}
    assert sorted(found - listed) == [], "new: use a public name, or add its reason to the list"
    assert sorted(listed - found) == [], "not used anymore: take it off the list"


@pytest.mark.parametrize("until", sorted({until for _, _, until, _ in USES}))
def test_a_later_release_asks_for_a_second_look(until: str) -> None:
    library, release = until.split()
    (held,) = re.findall(rf"^{library}==(\d+\.\d+)", CONSTRAINTS.read_text("utf-8"), re.MULTILINE)
    assert held == release, f"is there a public name in {library} {held}?"


@pytest.mark.parametrize(
    "line",
    [
        "import torch._dynamo",
        "from torch._dynamo import reset",
        "from torch import _dynamo",
        "thing.other._dynamo()",
        "self._dynamo",
        "thing._dynamo = 1",
        "getattr(thing, '_dynamo', None)",
        "thing.__dict__['_dynamo']",
        "thing.__dict__.get('_dynamo')",
    ],
)
def test_a_private_name_is_seen(line: str) -> None:
    assert private_uses({"a.py": line})
    assert not private_uses({"a.py": line.replace("_dynamo", "__doc__")})
    klrls = "class A:\n    def __init__(self): self._dynamo = 1"
    assert bool(private_uses({"a.py": line, "b.py": klrls})) == ("import" in line)
