"""Embedding a workspace: order, resumption, bad rows, memory, and what the command line says."""

from __future__ import annotations

import hashlib
import io
import json
import multiprocessing
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import open_clip
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from tiny_encoders import TinyModel, tiny_model

from fnpipe.cli.main import run
from fnpipe.pipeline.embed.stage import EmbedConfig, embed
from fnpipe.pipeline.errors import InputError
from fnpipe.pipeline.workspace.embeddings import Embeddings
from fnpipe.pipeline.workspace.workspace import Workspace

WORDS = ("a", "the", "red", "blue", "dog", "cat", "standing", "near", "table", "street", "with", "small", "large")


@pytest.fixture(scope="module")
def tiny_clip(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return tiny_model(tmp_path_factory.mktemp("models"))


def pictures(n: int, seed: int = 0) -> list[bytes]:
    """Pictures that embed differently: coloured noise of several sizes."""
    rng = np.random.default_rng(seed)
    out = []
    for _ in range(n):
        coarse = rng.integers(0, 256, (4, 4, 3), dtype=np.uint8)
        size = (int(rng.integers(20, 60)), int(rng.integers(20, 60)))
        buffer = io.BytesIO()
        Image.fromarray(coarse).resize(size).save(buffer, "PNG")
        out.append(buffer.getvalue())
    return out


def captions(n: int, seed: int = 0) -> list[str]:
    """Captions of 1 to 20 words."""
    rng = np.random.default_rng(seed)
    return [" ".join(rng.choice(WORDS, rng.integers(1, 20))) for _ in range(n)]


def contents(directory: Path) -> dict[str, str]:
    """Every file below a directory, by digest."""
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def embed_with(workspace: Workspace, model: TinyModel, *flags: str, name: str = "clip") -> dict[str, str]:
    assert run(["embed", str(workspace.root), *model.flags, "--name", name, "--threads", "1", *flags]) == 0
    return contents(workspace.root / "embeddings" / name)


def alone(model: TinyModel, images: list[bytes], texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Each row by open_clip's own transform and forward pass, batch size 1, fp32, all positions of the context."""
    network, _, transform = open_clip.create_model_and_transforms(model.name, pretrained=str(model.checkpoint))
    tokenizer = open_clip.get_tokenizer(model.name)
    network.eval()
    with torch.no_grad():
        image_rows = [
            network.encode_image(transform(Image.open(io.BytesIO(data)))[None], normalize=True)[0] for data in images
        ]
        text_rows = [network.encode_text(tokenizer([text]), normalize=True)[0] for text in texts]
    return torch.stack(image_rows).numpy(), torch.stack(text_rows).numpy()


class TableEncoder:
    """An encoder without a network: a picture's vector is its mean colour, a caption's comes from its first word."""

    width = 3

    def __init__(self, side: int = 8) -> None:
        self.side = side
        self.description: Mapping[str, Any] = {"model": "table", "device": "cpu"}
        self.rows = {"nan": [np.nan, 1, 1], "inf": [np.inf, 0, 0], "zero": [0, 0, 0]}

    def prepare_image(self, rgb: np.ndarray) -> torch.Tensor:
        mean = torch.from_numpy(rgb.reshape(-1, 3).mean(axis=0).astype(np.uint8))
        return mean[:, None, None].expand(3, self.side, self.side).contiguous()

    def tokenize(self, texts: list[str]) -> torch.Tensor:
        names = list(self.rows)
        first = [text.split()[0] for text in texts]
        return torch.tensor([[names.index(word) if word in names else 9, 0] for word in first])

    def encode_images(self, batch: torch.Tensor) -> torch.Tensor:
        return batch.float().mean(dim=(2, 3))

    def encode_texts(self, tokens: torch.Tensor) -> torch.Tensor:
        rows = [*self.rows.values(), *[[1.0, 2.0, 3.0]] * 7]
        return torch.tensor([rows[int(row[0])] for row in tokens], dtype=torch.float32)


@pytest.mark.parametrize(("precision", "least"), [("fp32", 0.99999), ("bf16", 0.9995)])
@pytest.mark.parametrize("kind", ["fnpipe-test-clip", "fnpipe-test-custom", "fnpipe-test-padded"])
def test_every_row_of_a_shuffled_copy_equals_the_one_embedded_alone(make_workspace, tmp_path, kind, precision, least):
    model = tiny_model(tmp_path / "models", kind)
    images, texts = pictures(13), captions(26)
    expected_images, expected_texts = alone(model, images, texts)
    # The rows differ from one another by far more than the tolerance, or a wrong order would pass.
    for rows in (expected_images, expected_texts):
        assert (rows @ rows.T - 2 * np.eye(len(rows))).max() < 0.999
    order = np.random.default_rng(7).permutation(13)
    pair_order = (order[:, None] * 2 + np.arange(2)).ravel()
    workspace = make_workspace(
        13, captions=2, pictures=[images[i] for i in order], texts=[texts[j] for j in pair_order]
    )
    embed_with(workspace, model, "--precision", precision, "--batch-size", "4")
    found = Embeddings.open(workspace, "clip")
    image_cosines = (found.images.take(np.arange(13)) * expected_images[order]).sum(axis=1)
    text_cosines = (found.texts.take(np.arange(26)) * expected_texts[pair_order]).sum(axis=1)
    # float16 rounds each of the few numbers of these vectors: that moves a length, not a direction.
    for rows, cosines in (
        (found.images.take(np.arange(13)), image_cosines),
        (found.texts.take(np.arange(26)), text_cosines),
    ):
        assert (cosines / np.linalg.norm(rows, axis=1)).min() > least


def test_worker_count_and_interrupted_runs_change_no_byte(make_workspace, tiny_clip):
    workspace = make_workspace(23, captions=2, pictures=pictures(23), texts=captions(46))
    one = embed_with(workspace, tiny_clip, "--workers", "1", "--batch-size", "2", name="one")
    assert embed_with(workspace, tiny_clip, "--workers", "2", "--batch-size", "2", name="two") == one
    assert embed_with(workspace, tiny_clip, "--workers", "0", "--batch-size", "2", name="none") == one


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="needs /dev/shm")
def test_little_shared_memory_is_no_trouble_and_changes_no_byte(make_workspace, tiny_clip, monkeypatch):
    workspace = make_workspace(7, pictures=pictures(7))
    expected = embed_with(workspace, tiny_clip, "--workers", "1", name="roomy")

    def no_processes(*_: Any, **__: Any) -> None:
        raise AssertionError("started a process that shares memory")

    monkeypatch.setattr("fnpipe.pipeline.embed.load.DataLoader", no_processes)
    monkeypatch.setattr("fnpipe.pipeline.embed.load.shutil.disk_usage", lambda _: SimpleNamespace(free=1000))
    assert embed_with(workspace, tiny_clip, "--workers", "1", name="short") == expected


# A command that is killed with all its processes in the middle of the fourth shard.
KILLED = """
import os, signal, sys
from fnpipe.cli.main import run
from fnpipe.pipeline.files import atomic, arrays

write = arrays.write_array

def write_some(path, array):
    if path.name == "img_emb_00003.npy":
        os.killpg(0, signal.SIGKILL)
    write(path, array)

arrays.write_array = write_some
run(sys.argv[1:])
"""


@pytest.mark.skipif(not hasattr(os, "killpg"), reason="needs process groups")
def test_sigkill_and_resume_give_the_bytes_of_an_uninterrupted_run(make_workspace, tiny_clip, tmp_path):
    pics = pictures(24)
    pics[20] = pics[20][:60]
    workspace = make_workspace(24, captions=2, pictures=pics, texts=captions(48), images_per_shard=1)
    model = local_directory_model(tiny_clip, tmp_path / "local")
    whole = embed_flags(workspace, model, "whole")
    command = [sys.executable, "-c", KILLED, "embed", str(workspace.root), *model, "--name", "killed", "--threads", "1"]
    killed = subprocess.run(command, start_new_session=True, stderr=subprocess.DEVNULL)
    assert killed.returncode == -signal.SIGKILL
    assert len(list((workspace.root / "embeddings" / "killed" / "img_emb").glob("img_emb_*.npy"))) == 3
    assert embed_flags(workspace, model, "killed") == whole


def local_directory_model(model: TinyModel, directory: Path) -> list[str]:
    """The model as ``local-dir:``, which another process finds without registering a name."""
    directory.mkdir()
    config = open_clip.get_model_config(model.name)
    (directory / "open_clip_config.json").write_text(json.dumps({"model_cfg": config, "preprocess_cfg": {}}))
    shutil.copy(model.checkpoint, directory / "model.pth")
    return ["--model", f"local-dir:{directory}"]


def embed_flags(workspace: Workspace, flags: list[str], name: str) -> dict[str, str]:
    assert run(["embed", str(workspace.root), *flags, "--name", name, "--threads", "1"]) == 0
    return contents(workspace.root / "embeddings" / name)


def test_a_finished_run_again_changes_nothing_and_other_settings_are_refused(make_workspace, tiny_clip, capsys):
    workspace = make_workspace(6)
    first = embed_with(workspace, tiny_clip)
    assert embed_with(workspace, tiny_clip) == first
    capsys.readouterr()
    code = run(["embed", str(workspace.root), *tiny_clip.flags, "--threads", "1", "--precision", "fp16"])
    error = capsys.readouterr().err
    assert code == 2
    assert "precision" in error
    assert "--overwrite" in error
    assert error.count("\n") == 1


def test_meta_says_what_made_the_vectors(make_workspace, tiny_clip):
    workspace = make_workspace(4)
    embed_with(workspace, tiny_clip, "--precision", "fp32")
    meta = json.loads((workspace.root / "embeddings/clip/meta.json").read_text())
    weights = meta.pop("weights")
    assert {key: meta[key] for key in ("model", "pretrained", "width", "dtype", "threads", "normalised")} == {
        "model": tiny_clip.name,
        "pretrained": tiny_clip.checkpoint.name,
        "width": 16,
        "dtype": "float16",
        "threads": 1,
        "normalised": True,
    }
    assert meta["preprocessing"]["size"] == [32, 32]
    assert len(weights) == 64
    # Nothing of a machine or a moment is in it, so that equal runs have equal records.
    assert not any(word in json.dumps(meta) for word in ("/tmp", "time", "host"))


def test_a_picture_that_does_not_decode_is_listed_and_its_neighbours_are_untouched(make_workspace, tiny_clip):
    good = pictures(9)
    broken = [*good]
    broken[4] = good[4][: len(good[4]) // 2]
    sound = make_workspace(9, pictures=good, folder="sound")
    harmed = make_workspace(9, pictures=broken, folder="harmed")
    embed_with(sound, tiny_clip)
    embed_with(harmed, tiny_clip)
    bad = pq.read_table(harmed.root / "embeddings/clip/bad.parquet").to_pylist()
    assert bad == [{"image_id": 4, "pair_id": None, "reason": "decode-error"}]
    with_all, without = (Embeddings.open(w, "clip").images.take(np.arange(9)) for w in (sound, harmed))
    assert (without[4] == 0).all()
    assert (np.delete(with_all, 4, 0) == np.delete(without, 4, 0)).all()


def test_vectors_without_a_direction_are_listed_by_reason_and_kept_as_zeros(make_workspace):
    texts = ["fine one", "nan two", "zero three", "inf four", "fine five", "fine six"]
    workspace = make_workspace(6, texts=texts, images_per_shard=4)
    summary = embed(workspace, TableEncoder(), EmbedConfig(workers=0))
    found = Embeddings.open(workspace, "clip")
    reasons = pq.read_table(workspace.root / "embeddings/clip/bad.parquet")["reason"].to_pylist()
    assert (found.bad_pairs.tolist(), reasons) == ([1, 2, 3], ["not-finite", "zero", "not-finite"])
    assert (found.texts.take(np.array([1, 2, 3])) == 0).all()
    assert summary.bad["not-finite"] == 2


def test_a_shard_without_images_is_no_trouble(make_workspace):
    workspace = make_workspace(4, images_per_shard=4)
    empty = dict(workspace.manifest, images_per_shard=[4, 0], pairs_per_shard=[4, 0])
    empty["shards"] = [*workspace.manifest["shards"], workspace.manifest["shards"][0]]
    table = pq.read_table(workspace.pairs_path(0))
    pq.write_table(table.slice(0, 0), workspace.pairs_path(1))
    (workspace.root / "fnpipe.json").write_text(json.dumps(empty))
    opened = Workspace.open(workspace.root)
    embed(opened, TableEncoder(), EmbedConfig(workers=0))
    assert len(Embeddings.open(opened, "clip").images) == 4


def _peak_memory(root: Path, answers: Any) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    embed(Workspace.open(root), TableEncoder(side=224), EmbedConfig(workers=0, batch_size=8, threads=1))
    answers.put((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="forks")
def test_peak_memory_does_not_grow_with_the_number_of_shards(make_workspace):
    grown = {}
    for shards in (2, 20):
        workspace = make_workspace(40 * shards, images_per_shard=40, folder=f"shards-{shards}")
        context = multiprocessing.get_context("fork")
        answers = context.Queue()
        process = context.Process(target=_peak_memory, args=(workspace.root, answers))
        process.start()
        grown[shards] = answers.get(timeout=120)
        process.join()
    # The 18 more shards hold 100 MiB of prepared pictures.
    print(f"peak memory beyond the start: {grown[2]:.0f} MiB for 2 shards, {grown[20]:.0f} MiB for 20")
    assert grown[20] < grown[2] + 25


def test_an_unknown_model_is_refused_in_one_line_with_the_nearest_name(make_workspace, capsys):
    workspace = make_workspace(3)
    assert run(["embed", str(workspace.root), "--model", "ViT-B-23", "--pretrained", "openai"]) == 2
    error = capsys.readouterr().err
    assert "ViT-B-32" in error or "ViT-B-16" in error
    assert error.count("\n") == 1
    assert not (workspace.root / "embeddings").exists()


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--model", "ViT-B-32", "--pretrained", "laion2b_s34b_b79"], "laion2b_s34b_b79k"),
        (["--model", "ViT-B-32"], "--pretrained"),
        (["--model", "run:nowhere"], "nowhere"),
        (["--model", "clip:x"], "clip"),
        (["--model", "local-dir:/nowhere"], "open_clip_config.json"),
        ([], "--model"),
    ],
)
def test_a_model_that_cannot_be_had_is_one_line_and_no_download(make_workspace, capsys, monkeypatch, flags, says):
    def no_network(*_: Any, **__: Any) -> None:
        raise AssertionError("reached for the network")

    monkeypatch.setattr("socket.socket.connect", no_network)
    workspace = make_workspace(3)
    assert run(["embed", str(workspace.root), *flags]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--device", "cuda:7"], "cuda:7"),
        (["--device", "toaster"], "toaster"),
        (["--precision", "fp12"], "fp12"),
        (["--batch-size", "0"], "--batch-size"),
        (["--threads", "0"], "--threads"),
        (["--workers", "-1"], "--workers"),
        (["--name", "a/b"], "--name"),
        (["--engine", "steam"], "steam"),
    ],
)
def test_a_flag_that_makes_no_sense_is_one_line(make_workspace, tiny_clip, capsys, flags, says):
    workspace = make_workspace(3)
    assert run(["embed", str(workspace.root), *tiny_clip.flags, *flags]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1


def test_a_checkpoint_of_another_model_is_refused(make_workspace, tmp_path, capsys, tiny_clip):
    other = tiny_model(tmp_path / "models", "fnpipe-test-padded")
    junk = tmp_path / "junk.pt"
    junk.write_bytes(b"not a checkpoint")
    workspace = make_workspace(3)
    for checkpoint in (other.checkpoint, junk):
        assert run(["embed", str(workspace.root), "--model", tiny_clip.name, "--pretrained", str(checkpoint)]) == 2
        error = capsys.readouterr().err
        assert checkpoint.name in error
        assert error.count("\n") == 1


def test_a_missing_shard_is_named_before_any_work(make_workspace, capsys):
    workspace = make_workspace(12)
    (workspace.root / "shards" / "00002.tar").unlink()
    with pytest.raises(InputError, match=r"00002\.tar"):
        embed(workspace, TableEncoder(), EmbedConfig(workers=0))
    assert not list((workspace.root / "embeddings").rglob("*.npy"))


def test_the_json_summary_counts_what_was_made(make_workspace, tiny_clip, capsys):
    workspace = make_workspace(7, captions=2)
    assert run(["embed", str(workspace.root), *tiny_clip.flags, "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert (summary["images"], summary["pairs"], summary["width"]) == (7, 14, 16)
    assert summary["shards_done_before"] == 0
    assert run(["embed", str(workspace.root), *tiny_clip.flags, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["shards_done_before"] == 2
