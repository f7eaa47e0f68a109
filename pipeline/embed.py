"""``fnpipe embed``: vectors of every picture and caption, shard by shard.

The heart is `embed_shards`: shard tasks in, shard rows out, nothing read from or written to the workspace. It is the
same function on one machine and on many. A batch never reaches across shards, so a result does not depend on where a
run was interrupted, and several shards are in flight, so the encoder never waits at a shard's end.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch.utils.data import DataLoader, Dataset

from fnpipe.pipeline import atomic
from fnpipe.pipeline.decode import MAX_PIXELS, decode_or_none
from fnpipe.pipeline.embeddings import BAD_SCHEMA, image_array_path, text_array_path
from fnpipe.pipeline.encoders import Encoder
from fnpipe.pipeline.engines import RayPool
from fnpipe.pipeline.errors import InputError
from fnpipe.pipeline.progress import Advance, progress
from fnpipe.pipeline.storage import is_remote, local_path, read_ranges
from fnpipe.pipeline.threads import torch_threads
from fnpipe.pipeline.workers import available_cpus
from fnpipe.pipeline.workspace import Stage, Workspace

# A caption has a tenth to a quarter of a picture's tokens.
TEXTS_PER_IMAGE = 4

# Batches ahead per decoding process.
PREFETCHED_PARTS = 3

# Reasons in bad.parquet.
DECODE_ERROR = "decode-error"
NOT_FINITE = "not-finite"
ZERO = "zero"


@dataclass(frozen=True, kw_only=True)
class EmbedConfig:
    """How ``fnpipe embed`` works: one field per flag.

    Attributes:
        name: the directory under ``embeddings/``.
        batch_size: pictures per batch, and a quarter of the captions per batch; None: 32 on a CPU, 512 on a GPU.
        threads: what torch computes with; None: torch's own choice. It is part of the result's identity, because
            sums are cut differently, and never follows ``workers``.
        workers: processes that decode, 0 for this one itself; None: enough for the device. It changes no byte.
    """

    name: str = "clip"
    batch_size: int | None = None
    threads: int | None = None
    workers: int | None = None
    overwrite: bool = False

    def __post_init__(self) -> None:
        for flag, value, least in (
            ("--batch-size", self.batch_size, 1),
            ("--threads", self.threads, 1),
            ("--workers", self.workers, 0),
        ):
            if value is not None and value < least:
                raise InputError(f"{flag} {value}: must be at least {least}")
        if not self.name or "/" in self.name or self.name.startswith("."):
            raise InputError(f"--name {self.name!r}: must be a plain directory name")


@dataclass
class EmbedSummary:
    """What a run left behind.

    Attributes:
        bad: rows without an embedding, by reason.
        shards_done_before: shards that an earlier run had finished.
        seconds: of this run, loading of the model excluded.
    """

    name: str
    images: int
    pairs: int
    width: int
    shards: int
    bad: dict[str, int] = field(default_factory=dict)
    shards_done_before: int = 0
    seconds: float = 0.0

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class ShardTask:
    """All that is needed to embed a shard anywhere: where its pictures lie, and its captions.

    Attributes:
        offsets, sizes: (images,) int64, bytes inside the file at ``url``.
        captions: one per pair, in pair_id order.
        max_pixels: the limit under which the pictures were kept.
    """

    shard: int
    url: str
    offsets: np.ndarray
    sizes: np.ndarray
    captions: list[str]
    max_pixels: int = MAX_PIXELS


@dataclass(frozen=True)
class ShardRows:
    """The vectors of a shard.

    Attributes:
        images, texts: (images, d) and (pairs, d) float16, of length 1; zeros where ``bad`` says why.
        bad_images, bad_texts: row inside the shard -> reason.
        made_by: the description of the encoder that made them.
    """

    shard: int
    images: np.ndarray
    texts: np.ndarray
    bad_images: dict[int, str]
    bad_texts: dict[int, str]
    made_by: Mapping[str, Any]


@dataclass(frozen=True)
class ComputeOptions:
    """What `embed_shards` needs to know of the config. ``processes``: decode in worker processes, else in threads."""

    batch_size: int
    threads: int
    workers: int
    processes: bool = True

    @classmethod
    def of(cls, config: EmbedConfig, device: str, *, processes: bool = True) -> ComputeOptions:
        """The config with its defaults made definite for ``device`` (``cpu`` or ``cuda``)."""
        on_gpu, cores = device == "cuda", available_cpus()
        return cls(
            # On a CPU the layers' activations of 32 pictures still fit the caches; 128 are a tenth slower.
            batch_size=config.batch_size or (512 if on_gpu else 32),
            threads=config.threads or torch.get_num_threads(),
            # A core decodes 1,000 pictures in the second in which it encodes 20 to 40.
            workers=config.workers if config.workers is not None else max(1, cores - 1 if on_gpu else cores // 16),
            processes=processes,
        )


def embed(workspace: Workspace, encoder: Encoder, config: EmbedConfig) -> EmbedSummary:
    """Embed every picture and caption of the workspace into ``embeddings/<name>``, on this machine.

    Raises:
        InputError: the embeddings were begun with another model or other settings, or a shard is missing.
    """
    options = ComputeOptions.of(config, str(encoder.description.get("device", "cpu")))

    def compute(tasks: Iterable[ShardTask], advance: Advance) -> Iterator[ShardRows]:
        return embed_shards(encoder, tasks, options, advance)

    return fill(workspace, encoder.description, encoder.width, options, config, compute)


def embed_on_ray(
    workspace: Workspace,
    make_encoder: Callable[[], Encoder],
    config: EmbedConfig,
    *,
    address: str | None = None,
    gpu: bool | None = None,
) -> EmbedSummary:
    """`embed` on a Ray cluster: one encoder per worker, shards as tasks; this process reads and writes the workspace.

    Args:
        make_encoder: called in every worker; a checkpoint file it names must be there.
        address: of a running cluster; None starts one on this machine.
        gpu: give every worker a GPU; None: if the cluster has any.

    Raises:
        InputError: as `embed`; no Ray, no cluster, or workers whose encoders differ.
    """
    # Made definite here, because every machine of the cluster must compute with the same number.
    threads = config.threads or torch.get_num_threads()
    gpus = None if gpu is None else int(gpu)
    make_worker = partial(ShardWorker, make_encoder, replace(config, threads=threads))
    with RayPool[ShardTask, ShardRows](make_worker, address=address, cpus=threads, gpus=gpus) as pool:
        description, width, options = pool.description

        def compute(tasks: Iterable[ShardTask], advance: Advance) -> Iterator[ShardRows]:
            for rows in pool.map(tasks):
                advance(len(rows.images))
                yield rows

        return fill(workspace, description, width, options, config, compute)


class ShardWorker:
    """A cluster's worker: an encoder, and `embed_shards` for one shard at a time."""

    def __init__(self, make_encoder: Callable[[], Encoder], config: EmbedConfig) -> None:
        self.encoder = make_encoder()
        # Ray's processes hold threads that a fork would break.
        device = str(self.encoder.description.get("device", "cpu"))
        self.options = ComputeOptions.of(config, device, processes=False)

    def __call__(self, task: ShardTask, /) -> ShardRows:
        return next(embed_shards(self.encoder, [task], self.options))

    def describe(self) -> tuple[dict[str, Any], int, ComputeOptions]:
        return dict(self.encoder.description), self.encoder.width, self.options


def fill(
    workspace: Workspace,
    description: Mapping[str, Any],
    width: int,
    options: ComputeOptions,
    config: EmbedConfig,
    compute: Callable[[Iterable[ShardTask], Advance], Iterator[ShardRows]],
    *,
    inputs: Mapping[str, str] | None = None,
) -> EmbedSummary:
    """Have ``compute`` embed the shards that are not finished, and write each as it comes, in any order.

    ``inputs``: what else than the pairs the vectors are made from, with digests.
    """
    start = time.monotonic()
    stage = workspace.stage(f"embeddings/{config.name}")
    params = {**description, "batch_size": options.batch_size, "threads": options.threads}
    summary = EmbedSummary(config.name, workspace.n_images, workspace.n_pairs, width, workspace.n_shards)
    with stage.alone():
        if stage.begin(params, {"pairs": workspace.digest, **(inputs or {})}, overwrite=config.overwrite):
            todo = [shard for shard in range(workspace.n_shards) if not is_done(stage, shard)]
            summary.shards_done_before = workspace.n_shards - len(todo)
            require_shards(workspace, todo)
            images = int(sum(workspace.image_starts[s + 1] - workspace.image_starts[s] for s in todo))
            with progress(f"embed {config.name}", images, "images") as advance:
                for rows in compute((read_task(workspace, shard) for shard in todo), advance):
                    _refuse_other_encoder(rows, description)
                    write_rows(stage, rows)
            finish(stage, width, description, options)
        else:
            summary.shards_done_before = workspace.n_shards
        remove_parts(stage)
    summary.bad = count_bad(stage)
    summary.seconds = time.monotonic() - start
    return summary


def read_task(workspace: Workspace, shard: int) -> ShardTask:
    table = workspace.read_pairs(["image_id", "caption", "image_offset", "image_size"], shard=shard)
    first = np.flatnonzero(np.diff(table["image_id"].to_numpy(), prepend=-1))
    url = workspace.shard_url(shard)
    return ShardTask(
        shard=shard,
        # Another machine, or another working directory, has to find it too.
        url=url if is_remote(url) else os.path.abspath(local_path(url)),
        offsets=table["image_offset"].to_numpy()[first],
        sizes=table["image_size"].to_numpy()[first],
        captions=table["caption"].to_pylist(),
        max_pixels=workspace.max_pixels,
    )


def require_shards(workspace: Workspace, shards: Iterable[int]) -> None:
    """Find a missing file before the first hour of work, not after it."""
    for shard in shards:
        url = workspace.shard_url(shard)
        if not is_remote(url) and not Path(local_path(url)).is_file():
            raise InputError(f"{url}: the shard is gone; bring it back, or shard again into another directory")


# The heart: tasks to rows.


def embed_shards(
    encoder: Encoder, tasks: Iterable[ShardTask], options: ComputeOptions, advance: Advance = lambda n: None
) -> Iterator[ShardRows]:
    """Embed shards, in their order; while one is encoded, the next ones are decoded and tokenised."""
    started: deque[ShardTask] = deque()
    with torch_threads(options.threads):
        stream = prepared(encoder, parts_of(tasks, options.batch_size, started), options)
        # A shard's first part is its tokens, so that there is a part even where there is no picture.
        for tokens in stream:
            task = started.popleft()
            texts, bad_texts = unit_rows(encode_texts(encoder, tokens, TEXTS_PER_IMAGE * options.batch_size))
            outputs: list[torch.Tensor] = []
            failed: set[int] = set()
            for low in range(0, len(task.sizes), options.batch_size):
                batch, failures = next(stream)
                outputs.append(encoder.encode_images(batch))
                failed.update(low + row for row in failures)
                advance(len(batch))
            images, bad_images = unit_rows(rows_of(outputs, encoder.width))
            for row in failed:
                images[row] = 0
                bad_images[row] = DECODE_ERROR
            made_by = dict(encoder.description)
            yield ShardRows(task.shard, images, texts, dict(sorted(bad_images.items())), bad_texts, made_by)


@dataclass(frozen=True)
class ImagePart:
    """Pictures of one batch, still encoded."""

    url: str
    offsets: np.ndarray
    sizes: np.ndarray
    max_pixels: int


@dataclass(frozen=True)
class TextPart:
    """The captions of one shard."""

    captions: list[str]


def parts_of(tasks: Iterable[ShardTask], batch_size: int, started: deque[ShardTask]) -> Iterator[ImagePart | TextPart]:
    """The work of all shards in order; each task goes into ``started`` as its first part is handed out."""
    for task in tasks:
        started.append(task)
        yield TextPart(task.captions)
        for low in range(0, len(task.sizes), batch_size):
            high = low + batch_size
            yield ImagePart(task.url, task.offsets[low:high], task.sizes[low:high], task.max_pixels)


class Prepare(Dataset[Any]):
    """Reads, decodes, transforms and tokenises: everything before the encoder, without the encoder's weights."""

    def __init__(
        self, prepare_image: Callable[[np.ndarray], torch.Tensor], tokenize: Callable[[list[str]], torch.Tensor]
    ) -> None:
        self.prepare_image = prepare_image
        self.tokenize = tokenize

    def __getitem__(self, part: ImagePart | TextPart) -> Any:
        """Tokens (captions, L); or a batch (n, 3, h, w) and the rows of it that could not be decoded (blank)."""
        if isinstance(part, TextPart):
            return self.tokenize(part.captions) if part.captions else torch.empty((0, 1), dtype=torch.int64)
        encoded = read_ranges([part.url] * len(part.sizes), part.offsets, part.sizes)
        pictures = [decode_or_none(data, max_pixels=part.max_pixels) for data in encoded]
        failures = [row for row, picture in enumerate(pictures) if picture is None]
        # A blank keeps the place of a picture that is none, so that its neighbours' batch stays what it is.
        blank = np.zeros((1, 1, 3), np.uint8)
        return torch.stack([self.prepare_image(blank if rgb is None else rgb) for rgb in pictures]), failures


def prepared(encoder: Encoder, parts: Iterator[ImagePart | TextPart], options: ComputeOptions) -> Iterator[Any]:
    """Each part prepared, in order, a few ahead of the reader."""
    prepare = Prepare(encoder.prepare_image, encoder.tokenize)
    if not options.processes or _shared_memory_is_short(encoder, options):
        return _prepared_by_threads(prepare, parts, max(1, options.workers))
    on_linux = sys.platform.startswith("linux")
    loader = DataLoader(
        prepare,
        sampler=parts,  # iterated once, never measured
        batch_size=None,
        collate_fn=_as_it_is,
        num_workers=options.workers,
        prefetch_factor=PREFETCHED_PARTS if options.workers else None,
        pin_memory=encoder.description.get("device") == "cuda",
        # A forked worker needs neither to import torch nor to be sent the tokenizer.
        multiprocessing_context="fork" if options.workers and on_linux else None,
    )
    return iter(loader)


def _shared_memory_is_short(encoder: Encoder, options: ComputeOptions) -> bool:
    """Whether the batches in flight would not fit ``/dev/shm``; a process that overruns it dies without a word.

    Containers have 64 MiB there unless told otherwise.
    """
    directory = Path("/dev/shm")
    if not options.workers or not directory.is_dir():
        return False
    batch = encoder.prepare_image(np.zeros((1, 1, 3), np.uint8)).nbytes * options.batch_size
    return shutil.disk_usage(directory).free < 2 * batch * PREFETCHED_PARTS * options.workers


def _prepared_by_threads(prepare: Prepare, parts: Iterator[ImagePart | TextPart], workers: int) -> Iterator[Any]:
    """For processes that must not fork; decoding and resizing release the interpreter lock."""
    from concurrent.futures import Future, ThreadPoolExecutor

    ahead: deque[Future[Any]] = deque()
    with ThreadPoolExecutor(workers) as pool:
        for part in parts:
            ahead.append(pool.submit(prepare.__getitem__, part))
            if len(ahead) > 2 * workers:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()


def encode_texts(encoder: Encoder, tokens: torch.Tensor, batch_size: int) -> np.ndarray:
    """(n, L) int64 to (n, width) float32, in the order of the input.

    Captions of like length share a batch, so that an encoder that cuts a batch to its longest caption cuts the most.
    """
    order = torch.argsort(lengths(tokens), descending=True, stable=True)
    batches = [order[low : low + batch_size] for low in range(0, len(order), batch_size)]
    outputs = [encoder.encode_texts(tokens[rows]) for rows in batches]
    out = np.empty((len(tokens), encoder.width), np.float32)
    out[order.numpy()] = rows_of(outputs, encoder.width)
    return out


def lengths(tokens: torch.Tensor) -> torch.Tensor:
    """(n,) int64: tokens before the padding, whatever the pad id: the run of equal tokens that ends a row."""
    differs = tokens != tokens[:, -1:]
    last = tokens.shape[1] - differs.flip(1).int().argmax(dim=1)
    return torch.where(differs.any(dim=1), last, 0)


def rows_of(outputs: list[torch.Tensor], width: int) -> np.ndarray:
    """Batches of one shard, on any device and in any precision, as one (n, width) float32 array."""
    if not outputs:
        return np.empty((0, width), np.float32)
    # One transfer per shard: a copy per batch would make the device wait for the host each time.
    rows: np.ndarray = torch.cat([batch.detach() for batch in outputs]).float().cpu().numpy()
    if rows.shape[1] != width:
        raise ValueError(f"the encoder gave vectors of {rows.shape[1]} numbers and says {width}")
    return rows


def unit_rows(rows: np.ndarray) -> tuple[np.ndarray, dict[int, str]]:
    """Rows scaled to length 1; zeros for those that have no direction, with the reason.

    Args:
        rows: (n, d) of any float type.

    Returns:
        (n, d) float16, and row -> ``not-finite`` or ``zero``.
    """
    rows = rows.astype(np.float32, copy=False) if rows.dtype != np.float64 else rows
    finite = np.isfinite(rows).all(axis=1)
    largest = np.abs(np.where(finite[:, None], rows, 0)).max(axis=1, initial=0)
    good = finite & (largest > 0)
    out = np.zeros(rows.shape, np.float16)
    # Scaled by the largest entry first, because the squares of tiny or huge entries leave even float32's range.
    scaled = (rows[good] / largest[good, None]).astype(np.float32)
    out[good] = (scaled / np.linalg.norm(scaled, axis=1, keepdims=True)).astype(np.float16)
    return out, {int(row): ZERO if finite[row] else NOT_FINITE for row in np.flatnonzero(~good)}


# The edge: what a shard leaves on disk.


def write_rows(stage: Stage, rows: ShardRows) -> None:
    """Write a shard's arrays; the image array comes last and says that the shard is finished."""
    images, texts = rows.bad_images, rows.bad_texts
    first_image = int(stage.workspace.image_starts[rows.shard])
    first_pair = int(stage.workspace.pair_starts[rows.shard])
    table = pa.table(
        {
            "image_id": [first_image + row for row in images] + [None] * len(texts),
            "pair_id": [None] * len(images) + [first_pair + row for row in texts],
            "reason": [*images.values(), *texts.values()],
        },
        BAD_SCHEMA,
    )
    atomic.write_table(_part_path(stage, rows.shard), table)
    atomic.write_array(text_array_path(stage.path, rows.shard), rows.texts)
    atomic.write_array(image_array_path(stage.path, rows.shard), rows.images)


def is_done(stage: Stage, shard: int) -> bool:
    return image_array_path(stage.path, shard).exists()


def finish(stage: Stage, width: int, description: Mapping[str, Any], options: ComputeOptions | None) -> None:
    """Join the shards' bad rows into ``bad.parquet`` and mark the embeddings as finished."""
    shards = range(stage.workspace.n_shards)
    parts = [atomic.read_table(_part_path(stage, shard)) for shard in shards]
    atomic.write_table(stage.path / "bad.parquet", pa.concat_tables([BAD_SCHEMA.empty_table(), *parts]))
    arrays = [path_of(stage.path, shard) for path_of in (image_array_path, text_array_path) for shard in shards]
    facts = {"threads": options.threads} if options else {}
    stage.finish([*arrays, "bad.parquet"], **description, **facts, width=width, dtype="float16", normalised=True)


def remove_parts(stage: Stage) -> None:
    """Remove the shards' own lists of bad rows, which ``bad.parquet`` holds by now."""
    for path in (stage.path / "parts").glob("*.parquet"):
        path.unlink()
    if (stage.path / "parts").is_dir():
        (stage.path / "parts").rmdir()


def count_bad(stage: Stage) -> dict[str, int]:
    reasons = atomic.read_table(stage.path / "bad.parquet")["reason"].to_pylist()
    return {reason: reasons.count(reason) for reason in sorted(set(reasons))}


def _part_path(stage: Stage, shard: int) -> Path:
    return stage.path / "parts" / f"{shard:05d}.parquet"


def _refuse_other_encoder(rows: ShardRows, description: Mapping[str, Any]) -> None:
    """A cluster's machines may differ in device, precision or checkpoint file: their vectors must not mix."""
    if json.dumps(rows.made_by, sort_keys=True) != json.dumps(dict(description), sort_keys=True):
        differs = [key for key in description if rows.made_by.get(key) != description[key]]
        raise InputError(
            f"shard {rows.shard} came from a worker whose {', '.join(differs)} differs "
            f"({rows.made_by.get(differs[0]) if differs else rows.made_by}); name --device and --precision"
        )


def _as_it_is(item: Any) -> Any:
    return item
