"""The house: rooms and what they import, sizes, docstrings, public names. All read from the syntax trees."""

import ast
import pkgutil
import re
import tomllib
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import betahook

ROOT = Path(__file__).parents[2]

BASE = {"theory", "compat"}
PIPELINE = BASE | {"measure", "models", "control", "state", "tap", "layer"}
ATTACHED = PIPELINE | {"rerun", "checkpoint", "report", "options", "step", "hook"}
ROOMS = {
    "theory": set(),
    "compat": set(),
    "version": set(),
    "log": set(),
    "measure": BASE,
    "models": {"compat"},
    "control": {"theory", "measure"},
    "state": {"compat", "measure"},
    "layer": BASE | {"measure", "models", "state"},
    "tap": BASE | {"measure", "models", "state"},
    "rerun": {"compat", "measure", "models", "tap"},
    "checkpoint": PIPELINE,
    "report": PIPELINE | {"rerun"},
    "options": PIPELINE | {"checkpoint", "report"},
    "step": PIPELINE | {"rerun", "options"},
    "hook": ATTACHED - {"hook"},
    "examination": ATTACHED,
    "keep": ATTACHED | {"version"},
    "__init__": ATTACHED | {"examination", "keep", "log", "version"},
    "cli": ATTACHED | {"examination", "keep", "__init__"},
    "__main__": {"cli"},
    "integrations": ATTACHED | {"keep", "__init__"},
}
"""A folder or a file of betahook/, to the others that it may import; from the bottom to the top."""

PUBLIC = [
    "Alert",
    "Alerts",
    "AttentionLayer",
    "Audit",
    "BetaSearch",
    "Cap",
    "Clip",
    "Condition",
    "Controller",
    "ControllerChoice",
    "Decades",
    "Examination",
    "Finding",
    "Findings",
    "FoldError",
    "Gradient",
    "Hook",
    "LayerAudit",
    "LayerChoice",
    "MetricName",
    "Monitor",
    "Observation",
    "Picture",
    "Precision",
    "Search",
    "Statistics",
    "UnsupportedModelError",
    "Variance",
    "attach",
    "detach",
    "examine",
    "fold",
    "restore",
]

LONGEST = {"file": 350, "class": 200, "function": 50}
RIDDLES = re.compile(r"(What|Whether|Why|Where|Which)\b")


def _module(path):
    """The name under which a file is imported."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = ("betahook", *parts) if parts[0] == "integrations" else parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {_module(path): path for name in ("betahook", "integrations") for path in sorted((ROOT / name).rglob("*.py"))}
TREES = {module: ast.parse(path.read_text()) for module, path in FILES.items()}
TESTS = {path: ast.parse(path.read_text()) for path in sorted((ROOT / "tests").rglob("*.py"))}


def _imported(tree, module="", is_package=False):
    """Every dotted name that a file imports, wherever it does; what `from x import y` takes may be a module or not."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            folder = module.split(".")
            folder = folder[: len(folder) - node.level + is_package] if node.level else []
            source = ".".join([*folder, *filter(None, [node.module])])
            yield from (f"{source}.{name.name}" for name in node.names)
        elif isinstance(node, ast.Call) and "import" in ast.unparse(node.func):
            yield from (
                name.value for name in node.args if isinstance(name, ast.Constant) and isinstance(name.value, str)
            )


def _edges():
    """Each file of ours to those of ours that it imports, by their names."""
    for module, tree in TREES.items():
        for name in _imported(tree, module, FILES[module].name == "__init__.py"):
            target = next((known for known in (name, name.rpartition(".")[0]) if known in FILES), None)
            if target is not None and target != module:
                yield module, target


def _room(module):
    return module.split(".")[1] if "." in module else "__init__"


def _graph(edges):
    graph = {}
    for source, target in edges:
        graph.setdefault(source, set()).add(target)
    return graph


def _circle(graph):
    """The names along one circle, None where there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return None


def _nodes(*kinds):
    """Nodes of our syntax trees, with where they are."""
    for module, tree in TREES.items():
        yield from ((f"{module}:{node.lineno}", node) for node in ast.walk(tree) if isinstance(node, kinds))


def _too_long(limit, *kinds):
    sizes = {(place, node.name): node.end_lineno - node.lineno + 1 for place, node in _nodes(*kinds)}
    return {place: size for place, size in sizes.items() if size > limit}


def test_every_room_is_in_the_table_and_every_one_of_the_table_is_there():
    assert {_room(module) for module in FILES} == set(ROOMS)


def test_every_folder_of_the_package_is_in_the_wheel():
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = (file.parent.relative_to(ROOT) for file in ROOT.glob("betahook/**/__init__.py"))
    assert sorted(listed) == sorted([*(".".join(folder.parts) for folder in folders), "betahook.integrations"])


def test_the_table_has_no_circle():
    assert _circle(ROOMS) is None


def test_a_room_imports_only_rooms_below_it():
    climbs = {
        f"{source} imports {target}"
        for source, target in _edges()
        if _room(target) not in {_room(source), *ROOMS.get(_room(source), ())}
    }
    assert climbs == set()


def test_no_circle_of_files():
    assert _circle(_graph(_edges())) is None


def test_no_circle_of_rooms():
    edges = {(_room(source), _room(target)) for source, target in _edges()}
    assert _circle(_graph((a, b) for a, b in edges if a != b)) is None


def test_only_what_installs_the_tap_knows_that_for_attention_by_hand():
    by_hand = "betahook.tap.by_hand"
    users = {source for source, target in _edges() if target.startswith(by_hand) and not source.startswith(by_hand)}
    assert users == {"betahook.tap.install"}


@pytest.mark.parametrize(
    ("code", "imported"),
    [
        ("import betahook.tap.gain as g", ["betahook.tap.gain"]),
        ("from betahook import hook, layer", ["betahook.hook", "betahook.layer"]),
        ("if TYPE_CHECKING:\n    from betahook.hook import Hook", ["betahook.hook.Hook"]),
        ("def f():\n    from betahook.hook import Hook", ["betahook.hook.Hook"]),
        ("from . import gain", ["betahook.tap.gain"]),
        ("from .gain import scale_query", ["betahook.tap.gain.scale_query"]),
        ("from ..hook import Hook", ["betahook.hook.Hook"]),
        ("importlib.import_module('betahook.hook')", ["betahook.hook"]),
    ],
)
def test_imports_are_seen_wherever_they_are(code, imported):
    assert list(_imported(ast.parse(code), "betahook.tap.install")) == imported


def test_no_test_file_imports_another():
    names = {path.stem for path in TESTS if path.stem.startswith(("test_", "conftest"))}
    found = {
        f"{path.relative_to(ROOT)} imports {name}"
        for path, tree in TESTS.items()
        for name in _imported(tree)
        if names.intersection(name.split("."))
    }
    assert found == set()


def test_no_file_is_too_long():
    lengths = {module: len(path.read_text().splitlines()) for module, path in FILES.items()}
    assert {module: length for module, length in lengths.items() if length > LONGEST["file"]} == {}


def test_no_class_is_too_long():
    assert _too_long(LONGEST["class"], ast.ClassDef) == {}


def test_no_function_is_too_long():
    assert _too_long(LONGEST["function"], ast.FunctionDef, ast.AsyncFunctionDef) == {}


def test_every_file_says_what_is_in_it():
    assert [module for module, tree in TREES.items() if ast.get_docstring(tree) is None] == []


def test_docstrings_say_what_a_thing_is_and_are_no_riddles():
    """Those behind an assignment too."""
    constants = [(place, node.value) for place, node in _nodes(ast.Expr) if isinstance(node.value, ast.Constant)]
    texts = [(place, node.value) for place, node in constants if isinstance(node.value, str)]
    assert len(texts) > 300
    assert [(place, text.splitlines()[0]) for place, text in texts if RIDDLES.match(text)] == []


def test_only_module_docstrings_name_a_page_that_an_installed_package_lacks():
    texts = [(place, node.value) for place, node in _nodes(ast.Constant) if isinstance(node.value, str)]
    opening = {ast.get_docstring(tree, clean=False) for tree in TREES.values()}
    assert [place for place, text in texts if "docs/" in text and text not in opening] == []


def test_the_public_names():
    assert betahook.__all__ == PUBLIC
    assert [name for name in PUBLIC if not hasattr(betahook, name)] == []


def test_the_public_names_are_all_described():
    described = (ROOT / "docs/API.md").read_text()
    assert [name for name in PUBLIC if not re.search(rf"`{name}\b", described)] == []
    reference = (ROOT / "docs/site/reference.md").read_text()
    assert [name for name in PUBLIC if not re.search(rf":: {name}\n", reference)] == []


def test_no_public_name_is_that_of_a_module():
    """`import betahook.fold` would give the function or the module, whichever was imported last."""
    modules = {module.name for module in pkgutil.iter_modules(betahook.__path__)}
    assert modules.intersection(PUBLIC) == set()
