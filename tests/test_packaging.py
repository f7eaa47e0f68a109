"""What an install lays down: the packages, their data, and nothing at the top level but ``fnpipe``."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from importlib.metadata import requires
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent
ALWAYS = {
    *(f"fnpipe/mining/views/{name}" for name in ("page.html", "gallery.html", "gallery.css", "gallery.js")),
    *(f"fnpipe/train/reports/report.{kind}" for kind in ("html", "css")),
    "fnpipe/train/assets/encoder.safetensors",
    "fnpipe/train/assets/con_d.safetensors",
}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel, made by the build backend that is installed, from a copy of what the repository tracks."""
    place = tmp_path_factory.mktemp("build")
    source, out = place / "source", place / "out"
    source.mkdir()
    out.mkdir()
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.split(b"\0")
    for name in (file.decode() for file in files if file):
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    build = f"from setuptools import build_meta; build_meta.build_wheel({str(out)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=source, check=True, capture_output=True)
    return zipfile.ZipFile(next(out.glob("*.whl")))


def test_the_wheel_holds_every_module_and_every_data_file_under_fnpipe(wheel: zipfile.ZipFile):
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    packages = ("pipeline/", "mining/", "train/", "cli/", "api/")
    wanted = {name for name in tracked if name.startswith(packages) and (ROOT / name).is_file()}
    wanted = {f"fnpipe/{name.removeprefix('api/')}" for name in wanted}
    inside = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert inside == wanted
    assert inside >= ALWAYS
    assert any(name.endswith("licenses/LICENSE") for name in wheel.namelist())


def test_the_wheel_s_command_is_fnpipe(wheel: zipfile.ZipFile):
    name = next(name for name in wheel.namelist() if name.endswith("entry_points.txt"))
    assert wheel.read(name).decode().split() == ["[console_scripts]", "fnpipe", "=", "fnpipe.cli.main:main"]


def test_what_an_extra_brings_is_not_imported_without_it():
    # Modules that only an extra installs, by extra; and what asks for each.
    blocked = {"ray": "ray", "transformers": "blip", "eccv_caption": "eval"}
    block = "\n".join(f"sys.modules[{name!r}] = None" for name in blocked)
    modules = (
        "pipeline.embed.on_ray",
        "mining.connections.stage",
        "mining.discriminators.blip",
        "train.methods",
        "train.evaluation.retrieval",
        "train.evaluation.eccv",
        "train.model.export_open_clip",
    )
    imports = "\n".join(f"import fnpipe.{name}" for name in modules)
    found = subprocess.run([sys.executable, "-c", f"import sys\n{block}\n{imports}"], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    declared = " ".join(requires("fnpipe") or [])
    assert all(f'extra == "{extra}"' in declared for extra in blocked.values())


def test_help_imports_nothing_heavy():
    heavy = ("torch", "numpy", "pyarrow", "faiss", "open_clip", "numba", "datasets", "matplotlib", "PIL")
    script = (
        "import sys; from fnpipe.cli.main import run; assert run(['--help']) == 0; "
        f"print([name for name in {heavy!r} if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert found.stdout.splitlines()[-1] == "[]"


def test_the_citation_is_of_the_version_that_is_packaged():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    project = dict(
        re.findall(r'^(name|version|license) = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    )
    assert {"name": citation["title"], "version": citation["version"], "license": citation["license"]} == project
