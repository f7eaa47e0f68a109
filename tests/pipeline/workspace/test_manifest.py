"""``fnpipe.json``: a change of it is told by every command, and a sharding that overwrites is the way out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conftest import MakePairs
from fnpipe.cli.main import run
from fnpipe.pipeline.errors import InputError
from fnpipe.pipeline.shard.config import ShardConfig
from fnpipe.pipeline.shard.stage import shard
from fnpipe.pipeline.workspace.manifest import MANIFEST, read_manifest, write_manifest
from fnpipe.pipeline.workspace.workspace import Workspace

WRITTEN = {"format": 1, "complete": False, "seed": 0, "sources": [{"path": "päths", "rows": 3}], "params": {"x": 0.1}}


@pytest.fixture
def made(make_pairs: MakePairs, tmp_path: Path) -> tuple[str, Path]:
    source = str(make_pairs())
    shard([source], str(tmp_path / "made"), ShardConfig(workers=1))
    return source, tmp_path / "made"


@given(place=st.integers(0, 10_000), bit=st.integers(0, 7))
def test_a_bit_flipped_anywhere_is_told_or_changes_nothing(
    place: int, bit: int, tmp_path_factory: pytest.TempPathFactory
):
    root = tmp_path_factory.mktemp("w")
    write_manifest(root, WRITTEN)
    data = bytearray((root / MANIFEST).read_bytes())
    data[place % len(data)] ^= 1 << bit
    (root / MANIFEST).write_bytes(data)
    try:
        read = read_manifest(root)
    except InputError:
        return
    # White space alone differs, or it is the checksum's name, as if 0.1.0 had written it.
    assert {key: read[key] for key in WRITTEN} == WRITTEN


def test_what_is_written_is_read_again_without_its_checksum(tmp_path: Path):
    write_manifest(tmp_path, WRITTEN)
    assert read_manifest(tmp_path) == WRITTEN
    write_manifest(tmp_path, read_manifest(tmp_path) or {})
    assert read_manifest(tmp_path) == WRITTEN


def test_a_manifest_without_a_checksum_opens_as_of_0_1_0(made: tuple[str, Path]):
    path = made[1] / MANIFEST
    manifest = json.loads(path.read_bytes())
    assert list(manifest)[-1] == "checksum"
    path.write_text(json.dumps({key: value for key, value in manifest.items() if key != "checksum"}))
    assert Workspace.open(made[1]).n_images
    assert run(["status", str(made[1]), "--verify"]) == 0


DAMAGES = {
    "changed": lambda path: path.write_text(path.read_text().replace('"seed": 0', '"seed": 1')),
    "without keys": lambda path: path.write_text('{"complete": true}'),
    "no JSON": lambda path: path.write_bytes(path.read_bytes()[:100]),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_every_command_tells_of_a_changed_manifest_and_overwriting_mends_it(
    damage: str, made: tuple[str, Path], capsys: pytest.CaptureFixture[str]
):
    source, root = made
    DAMAGES[damage](root / MANIFEST)
    for command in (["status"], ["status", "--verify"], ["group", "--sampling", "random", "--batch-size", "4"]):
        assert run([command[0], str(root), *command[1:]]) == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 1
        assert f"{root / MANIFEST}: damaged (" in said
        assert "shard again with --overwrite" in said
    assert run(["shard", source, str(root), "--workers", "1"]) == 2
    assert run(["shard", source, str(root), "--workers", "1", "--overwrite"]) == 0
    assert run(["status", str(root), "--verify"]) == 0
