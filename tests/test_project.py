"""The shape of the project: import directions, and what an install lays down."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

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
