"""Feed every reader of files with files that are none, and count what is not answered in one line.

    python tools/robustness/fuzz.py [--inputs 10000 --targets json tar ... --seed 0]

Inputs are drawn by hypothesis: valid files with bytes changed, taken out, doubled and cut off, headers with extreme
numbers and valid checksums, JSON and YAML of any shape. A reader may return, or raise the exception that means "the
user can put this right"; anything else, a crash of the process, and more than ten seconds for one input are failures,
shrunk to their smallest form. The last line of the output is one JSON object.
"""

from __future__ import annotations

import argparse
import gzip
import io
import json
import os
import shutil
import signal
import sys
import tarfile
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from PIL import Image

from fnpipe.mining.data.truth import Truth
from fnpipe.mining.edges.labels import named
from fnpipe.mining.edges.lookup import EdgeLookup
from fnpipe.mining.edges.reader import EDGES_SCHEMA, read_edges
from fnpipe.mining.edges.relabel import count_labels
from fnpipe.mining.graph.graph import Graph
from fnpipe.mining.plans.plan import PLAN_SCHEMA, read_plan
from fnpipe.mining.views.config import InspectConfig
from fnpipe.mining.views.inspection import inspect_edges
from fnpipe.pipeline.errors import InputError
from fnpipe.pipeline.images.decode import BadImage, decode_rgb, inspect_image
from fnpipe.pipeline.shard.stage import ShardConfig, shard
from fnpipe.pipeline.sources.open import READERS, open_sources
from fnpipe.pipeline.sources.rows import RowBuilder
from fnpipe.pipeline.sources.source import ReadOptions, Tools
from fnpipe.pipeline.workspace.embeddings import Embeddings
from fnpipe.pipeline.workspace.workspace import Workspace
from fnpipe.train.learners.keys import make_config
from fnpipe.train.methods import read_values
from fnpipe.train.model.load import load_run
from fnpipe.train.status import status

SECONDS_PER_INPUT = 10
IMAGES = 6


class Hang(Exception):
    """An input took longer than any may."""


@dataclass(frozen=True)
class Target:
    """A reader under test.

    Attributes:
        inputs: what it is fed with.
        read: reads one input, in a directory of its own; whatever it raises but InputError is a failure.
        weight: its part of all inputs.
    """

    inputs: st.SearchStrategy[Any]
    read: Callable[[Any, Path], object]
    weight: int = 1


# Inputs

Edit = tuple[str, float, bytes]


def mutations(*originals: bytes) -> st.SearchStrategy[bytes]:
    """The originals with a few edits: bytes replaced, inserted, taken out, doubled, cut off; or no file at all."""
    edits = st.lists(
        st.tuples(
            st.sampled_from(["replace", "insert", "delete", "double", "cut"]),
            st.floats(0, 1),
            st.binary(min_size=1, max_size=8)
            | st.sampled_from([b"\xff" * 8, b"\0" * 8, b'"', b"[" * 4000, b"9" * 5000]),
        ),
        max_size=4,
    )
    return st.builds(_edited, st.sampled_from(originals), edits) | st.binary(max_size=200)


def _edited(data: bytes, edits: list[Edit]) -> bytes:
    for kind, where, piece in edits:
        at, length = int(where * len(data)), len(piece)
        if kind == "replace":
            data = data[:at] + piece + data[at + length :]
        elif kind == "insert":
            data = data[:at] + piece + data[at:]
        elif kind == "delete":
            data = data[:at] + data[at + length :]
        elif kind == "double":
            data = data[:at] + data[at : at + 64 * length] + data[at:]
        else:
            data = data[:at]
    return data


ANY_TEXT = st.text(max_size=12) | st.sampled_from(["\ud800", "a\0b", "../x", "/etc/x", "0.png", "\x1b[31m", "[red]"])
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | ANY_TEXT | st.just(10**40),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(ANY_TEXT, inner, max_size=4),
    max_leaves=8,
)
ROWS = st.lists(
    st.fixed_dictionaries({}, optional=dict.fromkeys(("image", "caption", "captions", "text"), JSON_VALUES))
    | JSON_VALUES,
    max_size=5,
)


def json_bytes(value: Any) -> bytes:
    return json.dumps(value).encode()


def json_files() -> st.SearchStrategy[bytes]:
    good = json_bytes([{"image": f"{i}.png", "caption": ["a", "b"]} for i in range(3)])
    lines = b"\n".join(json_bytes({"image": f"{i}.png", "caption": "a"}) for i in range(3))
    coco = {
        "images": [{"id": 1, "file_name": "0.png"}, {"id": 2, "file_name": "1.png"}],
        "annotations": [{"id": 7, "image_id": 1, "caption": "a"}, {"id": 8, "image_id": 2, "caption": "b"}],
    }
    karpathy = {"images": [{"filename": "0.png", "filepath": "", "split": "test", "sentences": [{"raw": "a"}]}]}
    drawn_coco = st.fixed_dictionaries(
        {},
        optional={
            "images": ROWS
            | st.lists(
                st.fixed_dictionaries({}, optional=dict.fromkeys(("id", "file_name", "sentences"), JSON_VALUES)),
                max_size=3,
            ),
            "annotations": ROWS
            | st.lists(
                st.fixed_dictionaries({}, optional=dict.fromkeys(("id", "image_id", "caption"), JSON_VALUES)),
                max_size=3,
            ),
        },
    )
    deep = st.sampled_from([b"[" * 100_000, b'{"a":' * 100_000, b'[{"image":' + b"[" * 3000 + b"]" * 3000 + b"}]"])
    return (
        mutations(good, lines, json_bytes(coco), json_bytes(karpathy))
        | st.builds(json_bytes, ROWS | drawn_coco | JSON_VALUES)
        | st.builds(lambda rows: b"\n".join(map(json_bytes, rows)), ROWS)
        | deep
    )


def table_files() -> st.SearchStrategy[bytes]:
    csv = b'image,caption\r\n0.png,"a, ""quoted"" one"\r\n1.png,"two\nlines"\r\n2.png,c\r\n'
    tsv = b'image\tcaption\n0.png\ta\n1.png\t"b\n'
    cells = st.text(st.sampled_from('ab",\t\n\r;|\0é\ud800'), max_size=40)
    return mutations(csv, tsv) | cells.map(lambda text: b"image,caption\n" + text.encode("utf-8", "surrogatepass"))


def parquet_bytes(table: pa.Table) -> bytes:
    out = io.BytesIO()
    pq.write_table(table, out, compression="none")
    return out.getvalue()


def odd_columns() -> st.SearchStrategy[pa.Array]:
    """Columns of many types, three rows each."""
    texts = ["0.png", None, "2.png"]
    blobs = [picture(0), None, b"x"]
    return st.sampled_from(
        [
            pa.array(texts),
            pa.array(texts, pa.large_string()),
            pa.array(texts).dictionary_encode(),
            pa.array(blobs, pa.binary()),
            pa.array(blobs, pa.large_binary()),
            pa.array([b"\xff\xfe", b"a", b""], pa.binary()).view(pa.string()),
            pa.array([[b"\xff", b"a"], [], None], pa.list_(pa.binary())),
            pa.array([["a", None], [], None], pa.list_(pa.string())),
            pa.array([["a"], ["b"], ["c"]], pa.list_(pa.string(), 1)),
            pa.array([[["a"]], [], None]),
            pa.array([1, 2, None]),
            pa.array([1.5, float("nan"), None]),
            pa.array([True, False, None]),
            pa.array([None, None, None]),
            pa.array([{"bytes": picture(0), "path": "a"}, {"bytes": None, "path": "0.png"}, None]),
            pa.array([{"bytes": 3, "path": 4}, None, None]),
            pa.array([{"path": "0.png"}, {"path": None}, None]),
            pa.array([{"x": 1}, None, None]),
            pa.array([[("a", 1)], [], None], pa.map_(pa.string(), pa.int32())),
            pa.array([1, 2, 3], pa.timestamp("s")),
        ]
    )


def parquet_files() -> st.SearchStrategy[bytes]:
    good = pa.table({"image": ["0.png", "1.png"], "caption": [["a"], ["b", "c"]]})
    embedded = pa.table({"image": [{"bytes": picture(i), "path": None} for i in range(2)], "caption": ["a", "b"]})
    odd = st.builds(lambda a, b: parquet_bytes(pa.table({"image": a, "caption": b})), odd_columns(), odd_columns())
    return mutations(parquet_bytes(good), parquet_bytes(embedded)) | odd


def arrow_files() -> st.SearchStrategy[bytes]:
    def stream(images: pa.Array, captions: pa.Array) -> bytes:
        table = pa.table({"image": images, "caption": captions})
        out = io.BytesIO()
        with pa.ipc.new_stream(out, table.schema) as writer:
            writer.write_table(table)
        return out.getvalue()

    good = stream(pa.array([{"bytes": picture(i), "path": None} for i in range(3)]), pa.array(["a", "b", "c"]))
    return mutations(good) | st.builds(stream, odd_columns(), odd_columns())


def picture(number: int, form: str = "PNG", mode: str = "RGB") -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (9, 7), (number * 40 % 256, 90, 200)).convert(mode).save(out, form)
    return out.getvalue()


def tar_bytes(members: Mapping[str, bytes], form: int = tarfile.USTAR_FORMAT) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form) as tar:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return out.getvalue()


def tar_files() -> st.SearchStrategy[bytes]:
    members = {}
    for i in range(3):
        members |= {f"{i}.png": picture(i), f"{i}.txt": b"a caption", f"{i}.json": b'{"caption": "a"}'}
    long = {f"{'long/' * 40}{i}.{end}": b"{}" for i in range(2) for end in ("json", "txt", "png")}
    plain, pax = tar_bytes(members), tar_bytes(long, tarfile.PAX_FORMAT)
    gnu = tar_bytes(long, tarfile.GNU_FORMAT)
    packed = gzip.compress(plain, mtime=0)
    return mutations(plain, pax, gnu, packed) | st.lists(tar_members(), max_size=6).map(b"".join)


@st.composite
def tar_members(draw: st.DrawFn) -> bytes:
    """A member whose header says anything, under a valid checksum."""
    header = bytearray(512)
    header[:100] = draw(
        st.binary(max_size=100) | st.sampled_from([b"a.png", b"a.txt", b"../a.json", b"/a", b""])
    ).ljust(100, b"\0")[:100]
    sizes = [b"00000000012\0", b"77777777777\0", b"-0000000001\0", b"\x80" + b"\xff" * 11, b"\xff" * 12, b"zz", b""]
    header[124:136] = draw(st.sampled_from(sizes) | st.binary(max_size=12)).ljust(12, b"\0")[:12]
    header[156:157] = draw(st.sampled_from([b"0", b"\0", b"1", b"2", b"5", b"L", b"K", b"x", b"g", b"S", b"7", b"V"]))
    header[257:263] = draw(st.sampled_from([b"ustar\0", b"ustar ", b"\0" * 6]))
    header[345:500] = draw(st.binary(max_size=20)).ljust(155, b"\0")
    header[148:156] = b"        "
    header[148:156] = b"%06o\0 " % sum(header)
    records = [
        b"0 a=b\n",
        b"00000 x",
        b"12 size=-99\n",
        b"30 size=" + b"9" * 20 + b"\n",
        b"9" * 5000 + b" a=b",
        b"16 path=../../x\n",
    ]
    content = draw(st.sampled_from(records) | st.binary(max_size=40))
    return bytes(header) + content.ljust(512, b"\0")[: draw(st.sampled_from([512, 512, 512, 100]))]


# Readers


def read_source(form: str, name: str) -> Callable[[bytes, Path], object]:
    """Read the rows of a source of one form, as `fnpipe shard` does before it opens any image."""

    def read(data: bytes, place: Path) -> object:
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_bytes(data)
        path = place / name.partition("/")[0]
        for how in (ReadOptions(), ReadOptions(header=False, caption_column="json:caption" if form == "tar" else "0")):
            with only_input_errors():
                (source,) = open_sources([str(path)], {"tar": "webdataset"}.get(form, form))
                rows = RowBuilder(0)
                READERS[source.format](source, how, rows, Tools(lambda f, items: map(f, items), place / "spool"))
                rows.table().validate(full=True)
        return None

    return read


def read_arrow(data: bytes, place: Path) -> object:
    state = {"_data_files": [{"filename": "data.arrow"}]}
    (place / "state.json").write_bytes(data if data[:1] in (b"{", b"[") else json_bytes(state))
    (place / "data.arrow").write_bytes(data)
    return read_source("hf", "unused/x")(b"", place.parent / "no") if not place.exists() else _read_folder(place, "hf")


def _read_folder(place: Path, form: str) -> None:
    with only_input_errors():
        (source,) = open_sources([str(place)], form)
        rows = RowBuilder(0)
        READERS[source.format](source, ReadOptions(), rows, Tools(lambda f, items: map(f, items), place / "spool"))
        rows.table().validate(full=True)


def read_folder(data: bytes, place: Path) -> object:
    (place / "0.png").write_bytes(picture(0))
    for name in ("metadata.jsonl", "captions.txt", "0.json"):
        (place / name).write_bytes(data)
        _read_folder(place, "folder")
        (place / name).unlink()
    return None


def read_picture(data: bytes, place: Path) -> object:
    for function in (inspect_image, decode_rgb):
        with suppress(BadImage):
            function(data, max_pixels=1 << 20)
    return None


def shard_whole(data: bytes, place: Path) -> object:
    """The whole stage: a row that cannot be used is quarantined, and the sum of rows holds."""
    source = place / "source"
    source.mkdir()
    for i in range(2):
        (source / f"{i}.png").write_bytes(picture(i) if i else data)
    (source / "pairs.json").write_bytes(data if data[:1] in (b"[", b"{") else json_bytes(_TWO_ROWS))
    with only_input_errors():
        made = shard([str(source / "pairs.json")], str(place / "ws"), ShardConfig(workers=1, images_per_shard=1))
        if made["rows"] != made["kept"] + sum(made["quarantined"].values()):
            raise AssertionError(made)
    return None


_TWO_ROWS = [{"image": "0.png", "caption": "a"}, {"image": "1.png", "caption": "b"}]


@contextmanager
def only_input_errors() -> Iterator[None]:
    with suppress(InputError):
        yield


class Made:
    """A small finished workspace, copied for every input that damages it."""

    root = Path()

    @classmethod
    def make(cls, root: Path) -> None:
        """Six pictures sharded, with embeddings, a graph, a plan and edges made of nothing."""
        source = root / "source"
        source.mkdir(parents=True)
        rows = []
        for i in range(IMAGES):
            (source / f"{i}.png").write_bytes(picture(i))
            rows.append({"image": f"{i}.png", "caption": f"caption {i}"})
        (source / "pairs.json").write_bytes(json_bytes(rows))
        cls.root = root / "ws"
        shard([str(source / "pairs.json")], str(cls.root), ShardConfig(workers=1, images_per_shard=4))
        workspace = Workspace.open(cls.root)
        inputs = {"pairs": workspace.digest}
        for name, files, facts in (
            ("embeddings/e", _embeddings(), {"width": 2}),
            ("graph/e", _graph(), {}),
            ("groups/g", {"epoch-000.parquet": parquet_bytes(plan())}, {}),
            ("edges/d", {"part-00000.parquet": parquet_bytes(edges())}, {}),
        ):
            stage = workspace.stage(name)
            stage.begin({"k": 1, "epochs": 1}, inputs)
            for file, data in files.items():
                (stage.path / file).parent.mkdir(exist_ok=True)
                (stage.path / file).write_bytes(data)
            stage.finish(sorted(files), **facts)


def npy(array: np.ndarray) -> bytes:
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


def _embeddings() -> dict[str, bytes]:
    files = {
        "bad.parquet": parquet_bytes(
            pa.table(
                {
                    "image_id": pa.array([], pa.int64()),
                    "pair_id": pa.array([], pa.int64()),
                    "reason": pa.array([], pa.string()),
                }
            )
        )
    }
    for shard_number, rows in enumerate((4, 2)):
        for kind in ("img_emb", "text_emb"):
            files[f"{kind}/{kind}_{shard_number:05d}.npy"] = npy(np.ones((rows, 2), np.float16))
    return files


def _graph() -> dict[str, bytes]:
    ids, sims = np.zeros((IMAGES, 1), np.int64), np.zeros((IMAGES, 1), np.float16)
    return {f"{way}.{kind}.npy": npy(array) for way in ("i2t", "t2i") for kind, array in (("ids", ids), ("sims", sims))}


def plan() -> pa.Table:
    slots = list(range(IMAGES))
    return pa.table({"batch": [0] * IMAGES, "slot": slots, "image_id": slots, "pair_id": slots}, schema=PLAN_SCHEMA)


def edges() -> pa.Table:
    columns = {
        **{"image_id": [0, 1], "pair_id": [1, 0], "image_key": ["a", "b"], "caption": ["[red]x", "\x1b[31m"]},
        **{"rank_i2t": [0, None], "rank_t2i": [None, 0], "similarity": [0.5, 0.25], "match_probability": [0.9, 0.1]},
        **{"uncertainty": [None, None], "label": named(np.array([2, 0]), ("negative", "ambiguous", "positive"))},
        "source": named(np.array([0, 0]), ("discriminator", "identity")),
    }
    return pa.table(columns, schema=EDGES_SCHEMA)


def odd_tables(good: pa.Table) -> st.SearchStrategy[bytes]:
    """A table with a column of another type, with nulls, extreme numbers, or missing; or its bytes damaged."""
    values = st.sampled_from(
        [
            pa.array([None] * len(good)),
            pa.array(["x"] * len(good)),
            pa.array([2**62] * len(good)),
            pa.array([-1] * len(good)),
            pa.array([float("nan")] * len(good)),
            pa.array([[1]] * len(good)),
            pa.array([b"\xff"] * len(good), pa.binary()).view(pa.string()),
        ]
    )

    def changed(number: int, column: pa.Array) -> bytes:
        return parquet_bytes(good.set_column(number, good.column_names[number], column))

    numbers = st.integers(0, good.num_columns - 1)
    dropped = numbers.map(lambda number: parquet_bytes(good.remove_column(number)))
    return mutations(parquet_bytes(good)) | st.builds(changed, numbers, values) | dropped


def damage(file: str, read: Callable[[Workspace], object]) -> Callable[[bytes, Path], object]:
    """Replace one file of the finished workspace, and read."""

    def read_damaged(data: bytes, place: Path) -> object:
        shutil.copytree(Made.root, place / "ws")
        (place / "ws" / file).write_bytes(data)
        with only_input_errors():
            read(Workspace.open(place / "ws"))
        with only_input_errors():
            status(str(place / "ws"), quarantine=True)
        return None

    return read_damaged


def read_all_edges(workspace: Workspace) -> None:
    stage = workspace.stage("edges/d")
    read_edges(stage).validate(full=True)
    EdgeLookup.read(stage).find(np.arange(IMAGES)[:, None], np.arange(IMAGES)[None, :])
    inspect_edges(stage, InspectConfig())
    count_labels(stage)


def read_graph(workspace: Workspace) -> None:
    graph = Graph.open(workspace, "e")
    np.asarray(graph.i2t_ids)


def read_embeddings(workspace: Workspace) -> None:
    Embeddings.open(workspace, "e").images.take(np.arange(IMAGES))


def read_truth(data: bytes, place: Path) -> object:
    (place / "t.parquet").write_bytes(data)
    with only_input_errors():
        Truth.read(place / "t.parquet", Workspace.open(Made.root)).matches(np.arange(IMAGES), np.arange(IMAGES))
    return None


def read_yaml(data: bytes, place: Path) -> object:
    (place / "c.yaml").write_bytes(data)
    workspace = Workspace.open(Made.root)
    with only_input_errors():
        make_config(read_values(workspace, "r", {"method": "itc"}, [], str(place / "c.yaml")))
    text = data[:60].decode("utf-8", "replace").replace("\0", "")
    with only_input_errors():
        make_config(read_values(workspace, "r", {"method": "itc"}, [f"lr={text}", text]))
    return None


def yaml_files() -> st.SearchStrategy[bytes]:
    good = b"method: mafa\nlr: 1e-4\nepochs: 3\nitm: true\nseed: 7\n"
    laughs = b"a: &a [x, x]\n" + b"".join(
        b"%c: &%c [*%c, *%c, *%c, *%c, *%c, *%c, *%c, *%c]\n" % (c + 1, c + 1, *[c] * 8) for c in range(97, 108)
    )
    odd = [
        b"[" * 5000,
        b"lr: " + b"9" * 5000,
        b"? [1]: 2",
        b"lr: !!python/object/apply:os.system [id]",
        laughs,
        b"lr: 2001-01-01",
        b"<<: 3",
        b"lr: *lr",
        b"- 1",
    ]
    drawn = st.dictionaries(
        st.sampled_from(["lr", "epochs", "seed", "method", "itm", "model", "nope"]), JSON_VALUES, max_size=3
    )
    return mutations(good) | st.sampled_from(odd) | drawn.map(json_bytes)


def read_model(data: bytes, place: Path) -> object:
    (place / "m.safetensors").write_bytes(data)
    with only_input_errors():
        load_run(place / "m.safetensors")
    return None


def model_files() -> st.SearchStrategy[bytes]:
    def written(metadata: Mapping[str, str] | None, names: list[str]) -> bytes:
        from safetensors.numpy import save

        return save({name: np.zeros(2, np.float32) for name in names}, None if metadata is None else dict(metadata))

    configs = st.sampled_from(
        [
            '{"architecture": "fnpipe-tiny"}',
            "{}",
            "[",
            "[]",
            "3",
            '{"architecture": "ViT-B-32", "fusion_layers": -1}',
            '{"architecture": 3}',
            '{"nope": 1}',
        ]
    )
    metadata = st.none() | st.fixed_dictionaries(
        {"format": st.sampled_from(["fnpipe-model-1", "fnpipe-model", "fnpipe-frozen-1", "x"])},
        optional={"config": configs},
    )
    drawn = st.builds(written, metadata, st.lists(st.sampled_from(["temp", "clip.visual.proj"]), unique=True))
    return drawn | mutations(written({"format": "fnpipe-model-1", "config": "{}"}, ["temp"]))


def json_files_like(value: Any) -> st.SearchStrategy[bytes]:
    """A JSON object with some of its values replaced or gone, or its bytes damaged."""
    changed = st.dictionaries(st.sampled_from(sorted(value)), JSON_VALUES, max_size=2)
    gone = st.sets(st.sampled_from(sorted(value)), max_size=2)
    drawn = st.builds(
        lambda new, out: json_bytes({k: v for k, v in {**value, **new}.items() if k not in out}), changed, gone
    )
    return drawn | mutations(json_bytes(value))


def targets() -> dict[str, Target]:
    """Every reader; the workspace of `Made` is there."""
    manifest = json.loads((Made.root / "fnpipe.json").read_bytes())
    meta = {name: json.loads((Made.root / name / "meta.json").read_bytes()) for name in ("graph/e", "groups/g")}
    config = {"inputs": {"pairs": "x"}, "asked": {"lr": 1}, "complete": True}
    truth = pa.table({"image": ["0.png", "1.png"], "concept": ["a", "b"]})

    def read_run(data: bytes, place: Path) -> object:
        shutil.copytree(Made.root, place / "ws")
        run = place / "ws" / "runs" / "r"
        run.mkdir(parents=True)
        (run / "config.json").write_bytes(data)
        with only_input_errors():
            status(str(place / "ws"))
        return None

    pictures = mutations(
        *(
            picture(1, form, mode)
            for form, mode in (
                ("PNG", "RGBA"),
                ("JPEG", "CMYK"),
                ("GIF", "P"),
                ("WEBP", "RGB"),
                ("TIFF", "RGB"),
                ("BMP", "RGB"),
                ("PNG", "I;16"),
            )
        )
    )
    return {
        "json": Target(json_files(), read_source("auto", "s.json"), 3),
        "csv": Target(table_files(), read_source("csv", "s.csv"), 2),
        "tsv": Target(table_files(), read_source("tsv", "s.tsv")),
        "parquet": Target(parquet_files(), read_source("parquet", "s.parquet"), 2),
        "tar": Target(tar_files(), read_source("tar", "s.tar"), 4),
        "arrow": Target(arrow_files() | json_files_like({"_data_files": [{"filename": "data.arrow"}]}), read_arrow, 2),
        "folder": Target(json_files() | table_files(), read_folder, 2),
        "picture": Target(pictures, read_picture, 2),
        "shard": Target(pictures | st.builds(json_bytes, ROWS), shard_whole),
        "edges": Target(odd_tables(edges()), damage("edges/d/part-00000.parquet", read_all_edges), 2),
        "plan": Target(
            odd_tables(plan()), damage("groups/g/epoch-000.parquet", lambda w: read_plan(w.stage("groups/g"), 0))
        ),
        "plan-meta": Target(
            json_files_like(meta["groups/g"]), damage("groups/g/meta.json", lambda w: read_plan(w.stage("groups/g"), 0))
        ),
        "graph": Target(
            mutations(npy(np.zeros((IMAGES, 1), np.int64)), npy(np.zeros((2, 3), "U3"))),
            damage("graph/e/i2t.ids.npy", read_graph),
        ),
        "graph-meta": Target(json_files_like(meta["graph/e"]), damage("graph/e/meta.json", read_graph)),
        "embeddings": Target(
            mutations(npy(np.ones((4, 2), np.float16))),
            damage("embeddings/e/img_emb/img_emb_00000.npy", read_embeddings),
        ),
        "pairs": Target(
            odd_tables(pq.read_table(Made.root / "pairs" / "00000.parquet")),
            damage("pairs/00000.parquet", lambda w: w.read_pairs()),
        ),
        "manifest": Target(json_files_like(manifest), damage("fnpipe.json", lambda w: w.read_images())),
        "run": Target(json_files_like(config), read_run),
        "truth": Target(odd_tables(truth), read_truth),
        "yaml": Target(yaml_files(), read_yaml, 2),
        "model": Target(model_files(), read_model),
    }


# Running


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--inputs", type=int, default=10_000)
    options.add_argument("--targets", nargs="+")
    options.add_argument("--seed", type=int, default=0)
    chosen = options.parse_args()
    base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="fnpipe-fuzz-", dir=base) as directory:
        report = fuzz(Path(directory), chosen.inputs, chosen.targets, chosen.seed)
    print(json.dumps(report))
    sys.exit(1 if report["failed"] else 0)


def fuzz(root: Path, inputs: int, names: list[str] | None, number: int) -> dict[str, Any]:
    """Feed the targets, each in a process of its own, so that one that crashes is told from one that raises."""
    Made.make(root / "made")
    every = targets()
    chosen = {name: every[name] for name in names or every}
    weights = sum(target.weight for target in chosen.values())
    fed: dict[str, int] = {}
    failed: dict[str, str] = {}
    for name, target in chosen.items():
        count = -(-inputs * target.weight // weights)
        said = root / f"{name}.said"
        said.write_text("")
        process = os.fork()
        if not process:
            os._exit(_feed(target, root / name, count, number, said))
        code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        fed[name] = int((root / f"{name}.count").read_text() or 0)
        if code:
            text = said.read_text()
            failed[name] = (
                text if len(text) < 4000 else f"{text[:3000]} ... {text[-1000:]}"
            ) or f"the process died of {code}"
        print(f"{name}: {fed[name]:,} inputs, {'FAILED' if code else 'fine'}", flush=True)
        if code:
            print(failed[name], flush=True)
    return {"inputs": sum(fed.values()), "by_target": fed, "failed": sorted(failed)}


def _feed(target: Target, root: Path, count: int, number: int, said: Path) -> int:
    counter = (root.parent / f"{root.name}.count").open("w")
    fed = 0

    @seed(number)
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.explicit, Phase.generate, Phase.shrink],
        print_blob=False,
    )
    @given(target.inputs)
    def feed(value: Any) -> None:
        nonlocal fed
        fed += 1
        counter.seek(0)
        counter.write(str(fed))
        counter.flush()
        place = root / "one"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        with alarm(SECONDS_PER_INPUT):
            target.read(value, place)

    sys.stderr = said.open("w")
    try:
        feed()
    except BaseException:
        said.write_text(traceback.format_exc())
        return 1
    return 0


@contextmanager
def alarm(seconds: int) -> Iterator[None]:
    def ring(*_: object) -> None:
        raise Hang(f"longer than {seconds} s")

    # Of the processor's time: the machine may have other things to do.
    signal.signal(signal.SIGPROF, ring)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


if __name__ == "__main__":
    main()
