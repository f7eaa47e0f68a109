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

# design.md: which of our packages each may import.
MAY_IMPORT = {
    "pipeline": {"pipeline"},
    "mining": {"pipeline", "mining"},
    "train": {"pipeline", "mining", "train"},
    "cli": {"pipeline", "mining", "train", "cli"},
}


def imported_packages(source: str) -> set[str]:
    """Our packages that a module imports, wherever in the module the import stands."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            module = node.module or ""
            names = [f"{module}.{alias.name}" for alias in node.names] if module == "fnpipe" else [module]
        found |= {name.split(".")[1] for name in names if name.startswith("fnpipe.")}
    return found


def test_the_import_check_sees_every_form_of_import():
    source = "import fnpipe.cli.app\nfrom fnpipe.train import model\ndef f():\n    from fnpipe import mining\n"
    assert imported_packages(source) == {"cli", "train", "mining"}


@pytest.mark.parametrize("package", sorted(MAY_IMPORT))
def test_imports_point_one_way(package: str):
    for path in sorted((ROOT / package).rglob("*.py")):
        forbidden = imported_packages(path.read_text()) - MAY_IMPORT[package]
        assert not forbidden, f"{path.relative_to(ROOT)} imports {sorted(forbidden)}"


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
    for path in (path for package in MAY_IMPORT for path in sorted((ROOT / package).rglob("*.py"))):
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
    extras = names_in([line for name in ("ray", "blip", "eval") for line in project["optional-dependencies"][name]])
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
    wanted = [*MAY_IMPORT, "pyproject.toml", "README.md", "LICENSE"]
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
    for package in MAY_IMPORT:
        assert f"fnpipe/{package}/py.typed" in names
    modules = {
        f"fnpipe/{p.relative_to(ROOT).as_posix()}" for package in MAY_IMPORT for p in (ROOT / package).rglob("*.py")
    }
    assert modules <= set(names), f"left out of the wheel: {sorted(modules - set(names))}"
