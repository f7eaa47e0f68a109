"""The shape of the project: import directions, and what an install lays down."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent

PACKAGES = ("pipeline", "mining", "train", "cli")

# The rooms, from the top floor to the ground. A room may import rooms of the floors below it, and itself; the modules
# that stand beside the rooms of a package are rooms of their own.
FLOORS = (
    ("cli.__main__",),
    ("cli.main",),
    ("cli.commands",),
    ("cli.app",),
    ("cli.options", "cli.completion"),
    ("train.demo",),
    ("train.methods", "train.status", "train.doctor"),
    ("train.learners",),
    ("train.loop", "train.falcon", "train.judges"),
    ("train.evaluation", "train.objectives"),
    ("train.model", "train.data", "train.reports"),
    ("train.runs",),
    ("train.keys", "train.distributed"),
    ("mining.review",),
    ("mining.views", "mining.exports", "mining.recipes"),
    ("mining.connections",),
    ("mining.plans", "mining.discriminators"),
    ("mining.graph", "mining.edges"),
    ("mining.data",),
    ("pipeline.shard", "pipeline.embed", "pipeline.scenes"),
    ("pipeline.sources", "pipeline.workspace"),
    ("pipeline.images",),
    ("pipeline.files", "pipeline.machine"),
    ("pipeline.errors", "pipeline.made_by", "pipeline.flags", "pipeline.on_demand"),
)
# What is still to be taken apart.
CROWDED: tuple[str, ...] = ()
LONG: tuple[str, ...] = ()
FLOOR_OF = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}

Modules = dict[str, Path]


def modules() -> Modules:
    """Every module of the product by its name without ``fnpipe.``; a package goes by the name of its folder."""
    found = {}
    for path in (path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        found[name.removesuffix(".__init__")] = path
    return found


def imports_of(source: str, known: Modules) -> set[str]:
    """The modules of ours that a module imports, wherever in it the import stands."""
    names = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    found = set()
    for name in (name.removeprefix("fnpipe.") for name in names if name.startswith("fnpipe.")):
        # What is imported may be a module, or something in one.
        module = name if name in known else name.rpartition(".")[0]
        found |= {module} & known.keys()
    return found


def room_of(module: str) -> str:
    return ".".join(module.split(".")[:2])


def cycles_in(arrows: dict[str, set[str]]) -> list[str]:
    """What can be reached from itself."""

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        ahead = list(arrows.get(start, ()))
        while ahead:
            at = ahead.pop()
            if at not in seen:
                seen.add(at)
                ahead += arrows.get(at, ())
        return seen

    return sorted(name for name in arrows if name in reached(name))


KNOWN = modules()
IMPORTS = {name: imports_of(path.read_text(), KNOWN) - {name} for name, path in KNOWN.items()}


def test_the_import_check_sees_every_form_of_import():
    known = dict.fromkeys(["cli.app", "train.keys", "mining.edges", "mining.edges.labels"], Path())
    source = (
        "import fnpipe.cli.app\nfrom fnpipe.train.keys import typed\nfrom __future__ import annotations\n"
        "def f():\n    from fnpipe.mining.edges import labels\n"
    )
    assert imports_of(source, known) == {"cli.app", "train.keys", "mining.edges.labels"}


def test_every_room_stands_on_a_floor():
    rooms = {room_of(name) for name in IMPORTS if "." in name}
    assert rooms == FLOOR_OF.keys() & rooms, sorted(rooms - FLOOR_OF.keys())


def test_rooms_import_downwards():
    for name, imported in IMPORTS.items():
        for other in sorted(imported):
            mine, theirs = room_of(name), room_of(other)
            if "." in name and "." in other and mine != theirs:
                assert FLOOR_OF[mine] < FLOOR_OF[theirs], f"{name} imports {other}, which stands no lower"


def test_no_modules_import_each_other():
    assert cycles_in(IMPORTS) == []


def test_cycles_are_found():
    assert cycles_in({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == ["b", "c"]


def test_no_room_is_crowded_and_no_module_long():
    for name, path in modules().items():
        if path.name == "__init__.py":
            beside = [other for other in path.parent.glob("*.py") if other.name != "__init__.py"]
            assert (len(beside) > 14) == (name in CROWDED), f"{name}: {len(beside)} modules"
        lines = len(path.read_text().splitlines())
        assert (lines > 350) == (name in LONG), f"{name}: {lines} lines"


# Kernels, which a call inside their loops would slow down or scatter.
LONG_FUNCTIONS = {"mining.plans.chain.chain", "mining.plans.quantile.quantile_order"}


def body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """The lines of a function without its signature and docstring."""
    first = function.body[ast.get_docstring(function) is not None :] or function.body
    return function.body[-1].end_lineno - first[0].lineno + 1


def test_only_kernels_have_more_than_40_lines():
    long = {
        f"{name}.{node.name}"
        for name, path in modules().items()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and body_lines(node) > 40
    }
    assert long == LONG_FUNCTIONS


# Where a package is imported under another name than it is installed by.
IMPORTED_AS = {
    "faiss-gpu": "faiss",
    "faiss-cpu": "faiss",
    "open-clip-torch": "open_clip",
    "pillow": "PIL",
    "pyyaml": "yaml",
}


def names_in(requirements: list[str]) -> set[str]:
    """The names under which what is required is imported."""
    found = {re.match(r"[A-Za-z0-9_.-]+", line)[0].lower().replace("_", "-") for line in requirements}
    return {IMPORTED_AS.get(name, name.replace("-", "_")) for name in found}


def foreign_imports() -> dict[str, str]:
    """What the product imports of others, with a module that does; those behind ``TYPE_CHECKING`` count too."""
    found = {}
    for path in (path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            for name in {name.partition(".")[0] for name in names} - sys.stdlib_module_names - {"fnpipe"}:
                found[name] = str(path.relative_to(ROOT))
    return found


def test_what_is_imported_is_declared_and_what_is_declared_is_imported():
    project = project_table()
    declared = names_in(project["dependencies"])
    extras = names_in(
        [line for name in ("ray", "blip", "eval", "review") for line in project["optional-dependencies"][name]]
    )
    imported = foreign_imports()
    undeclared = {name: where for name, where in imported.items() if name not in declared | extras}
    assert not undeclared, f"imported and not in [project.dependencies]: {undeclared}"
    assert not declared - imported.keys(), f"declared and not imported: {sorted(declared - imported.keys())}"


def project_table() -> dict[str, Any]:
    tomllib = pytest.importorskip("tomllib")
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.mark.parametrize("package", ["faiss", "webdataset", "datasets"])
def test_the_libraries_for_search_shards_and_data_sets_carry_the_product(package: str):
    assert package in foreign_imports()


def test_a_plain_install_puts_only_fnpipe_on_the_path(tmp_path: Path):
    tree = tmp_path / "tree"
    wanted = [*PACKAGES, "api", "pyproject.toml", "README.md", "LICENSE"]
    tree.mkdir()
    for name in wanted:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, tree / name)
    build = "from setuptools import build_meta; build_meta.build_wheel('out')"
    (tree / "out").mkdir()
    subprocess.run([sys.executable, "-c", build], cwd=tree, check=True, capture_output=True)
    (wheel,) = (tree / "out").glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    top = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    assert top == {"fnpipe"}
    assert {"fnpipe/__init__.py", "fnpipe/py.typed"} <= set(names)
    for package in PACKAGES:
        assert f"fnpipe/{package}/py.typed" in names
    modules = {
        f"fnpipe/{p.relative_to(ROOT).as_posix()}" for package in PACKAGES for p in (ROOT / package).rglob("*.py")
    }
    assert modules <= set(names), f"left out of the wheel: {sorted(modules - set(names))}"
