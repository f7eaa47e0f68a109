"""What ``import fnpipe`` offers, and what it costs."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest

import fnpipe
from conftest import MakeWorkspace
from fnpipe.cli.main import run

ROOT = Path(__file__).parent.parent
# Where the `__init__.py` of a package lies.
PACKAGES = {"fnpipe": "api", "fnpipe.pipeline": "pipeline", "fnpipe.mining": "mining", "fnpipe.train": "train"}


def test_fnpipe_offers_what_its_packages_offer_a_way_to_open_a_workspace_and_its_version():
    below = [name for package in PACKAGES if package != "fnpipe" for name in import_module(package).__all__]
    assert sorted(fnpipe.__all__) == sorted([*below, "__version__", "open"])
    assert dir(fnpipe) == sorted(fnpipe.__all__)
    assert fnpipe.__version__ == version("fnpipe")


@pytest.mark.parametrize("package", PACKAGES)
def test_every_name_that_is_offered_is_there_and_type_checkers_are_told_the_same(package: str):
    offered = import_module(package)
    for name in offered.__all__:
        assert getattr(offered, name) is not None
    tree = ast.parse((ROOT / PACKAGES[package] / "__init__.py").read_text())
    typed = {
        alias.asname: getattr(import_module(str(node.module)), alias.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname
    }
    assert typed.keys() == set(offered.__all__) - {"__version__", "open"}
    assert all(getattr(offered, name) is there for name, there in typed.items())


def test_what_the_stages_hold_comes_as_tables_and_arrays(
    make_workspace: MakeWorkspace, monkeypatch: pytest.MonkeyPatch
):
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(12, 4)), rng.normal(size=(12, 4))
    root = make_workspace(12, embeddings=rows, splits=["train"] * 10 + ["test"] * 2).root
    for words in (
        "group WS --batch-size 2 --search-space 10 --epochs 2",
        "mine-connections WS --discriminator clip --score-recorded",
    ):
        assert run(words.replace("WS", str(root)).split()) == 0
    work = fnpipe.open(root)
    assert work.pairs(split="test")["image_id"].to_pylist() == [10, 11]
    first, again = work.plan(), work.plan("grit-10", 2)
    assert first.equals(again)
    assert first.num_rows == 10
    assert not first.equals(work.plan(epoch=1))
    edges = work.edges(columns=["image_id", "match_probability"]).to_pandas()
    assert list(edges.columns) == ["image_id", "match_probability"]
    assert len(edges) == work.edges("clip").num_rows > 0
    images = np.asarray(work.embeddings().images)
    assert images.shape == (12, 4)
    np.testing.assert_array_equal(
        images[[3, 7]].astype(np.float32), work.embeddings("clip").images.take(np.array([3, 7]))
    )
    assert np.array(work.embeddings().texts, np.float64).dtype == np.float64
    # The guide's way to recorded pairs that may be wrong.
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "guide" / "curate.md").read_text(), re.DOTALL)
    monkeypatch.chdir(root.parent)
    exec(compile(code.replace('"work"', repr(root.name)), "curate.md", "exec"), scope := {})
    assert sorted(scope["doubtful"]["pair_id"]) == list(range(10))
    assert scope["doubtful"]["match_probability"].is_monotonic_increasing
    with pytest.raises(fnpipe.InputError, match=r"no edges 'itm' \(it has clip\)"):
        work.edges("itm")


@pytest.mark.parametrize("package", PACKAGES)
def test_no_other_name_is_there(package: str):
    with pytest.raises(AttributeError, match=f"module '{package}' has no attribute 'nothing'"):
        import_module(package).nothing  # noqa: B018


def test_a_workspace_is_opened(make_workspace: MakeWorkspace):
    root = make_workspace().root
    opened = fnpipe.open(root)
    assert isinstance(opened, fnpipe.Workspace)
    assert opened.root == root
    assert opened.pairs(["pair_id"])["pair_id"].to_pylist() == list(range(opened.n_pairs))
    with pytest.raises(fnpipe.InputError, match="shard"):
        fnpipe.open(root / "nothing")


def test_importing_fnpipe_loads_nothing_heavy_and_takes_less_than_a_tenth_of_a_second():
    program = """
import sys, time
before = time.process_time()
import fnpipe, fnpipe.pipeline, fnpipe.mining, fnpipe.train, fnpipe.cli
assert time.process_time() - before < 0.1, time.process_time() - before
loaded = {name.partition(".")[0] for name in sys.modules}
assert not loaded & {"torch", "pyarrow", "numpy", "PIL", "faiss", "typer"}, loaded
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
