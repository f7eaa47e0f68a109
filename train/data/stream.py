"""Materialised plans: the pictures of an epoch in batch order, as ``fnpipe group --materialize`` lays them down."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import IO, Any

import fsspec
import webdataset
from webdataset.gopen import gopen_schemes

from fnpipe.pipeline.errors import InputError
from fnpipe.pipeline.workspace.workspace import Stage

_HEADER = 512
# Beside a picture in its sample.
_NO_PICTURES = ("txt", "json")
# webdataset opens local paths itself; everything else through the file system that lists the shards.
_SCHEME = "fsspec"


def _open_remote(url: str, mode: str = "rb", bufsize: int = 8192, **_: Any) -> IO[bytes]:
    return fsspec.open(url.removeprefix(f"{_SCHEME}:"), mode).open()


gopen_schemes[_SCHEME] = _open_remote


def _every_node(urls: Iterable[Any]) -> Iterable[Any]:
    """Gives every process all shards: a rank takes its batches by their numbers."""
    return urls


class MaterializedPictures:
    """The encoded pictures of planned batches, from WebDataset shards on any file system that can be read forwards.

    A shard holds whole batches in ascending order; a sample's key is ``<batch>-<slot>``.
    """

    def __init__(self, directory: str, stage: Stage, epochs: int) -> None:
        """
        Args:
            stage: the plan. epochs: how many it has.

        Raises:
            InputError: the directory holds no materialised plan, or that of another one.
        """
        self.fs, self.root = fsspec.core.url_to_fs(directory)
        self.directory, self.epochs = directory, epochs
        try:
            with self.fs.open(f"{self.root}/plan.json", "rb") as file:
                note: Any = json.load(file)
        except (OSError, ValueError):
            raise InputError(f"{directory}: no plan.json; make it with `fnpipe group --materialize`") from None
        if note.get("digest") != stage.digest:
            raise InputError(f"{directory}: holds shards of another plan than {stage.name}; materialize it again")

    def shards(self, epoch: int) -> list[str]:
        """The shards of a training epoch, in batch order.

        Raises:
            InputError: there are none.
        """
        folder = f"{self.root}/epoch-{epoch % self.epochs:03d}"
        # By length first: the hundred-thousandth shard has a longer name.
        found = sorted(self.fs.glob(f"{folder}/*.tar"), key=lambda path: (len(path), path))
        if not found:
            raise InputError(f"{self.directory}: no shards of epoch {epoch % self.epochs}; materialize the plan again")
        return found

    def batches(self, epoch: int, numbers: Sequence[int]) -> Iterator[list[bytes]]:
        """The encoded pictures of the batches ``numbers`` (ascending), each in slot order.

        Shards that end before the first of them are not read, so that a resumed run begins where it stopped.

        Raises:
            InputError: a shard is damaged, or ends too early.
        """
        wanted = iter(numbers)
        number = next(wanted, None)
        if number is None:
            return
        for batch, pictures in self._read(self._from_batch(self.shards(epoch), number)):
            if batch == number:
                yield pictures
                number = next(wanted, None)
                if number is None:
                    return
        raise InputError(f"{self.directory}: epoch {epoch % self.epochs} has no batch {number}; materialize it again")

    def damaged(self, epoch: int, number: int, found: int, planned: int) -> InputError:
        """The error for a batch with another number of pictures than planned."""
        return InputError(
            f"{self.directory}: epoch {epoch % self.epochs}, batch {number} holds {found} pictures, {planned} are "
            "planned; materialize it again"
        )

    def _from_batch(self, shards: list[str], number: int) -> list[str]:
        """The shards without those that end before a batch."""
        for i, shard in enumerate(shards[1:]):
            if self._first_batch(shard) > number:
                return shards[i:]
        return shards[-1:]

    def _first_batch(self, shard: str) -> int:
        with self.fs.open(shard, "rb") as file:
            return self._batch_of(shard, file.read(_HEADER)[:100].split(b"\0")[0].decode("ascii", "replace"))

    def _batch_of(self, shard: str, name: str) -> int:
        batch = name.partition("-")[0]
        if not batch.isdigit():
            raise InputError(f"{shard}: damaged (it holds a member {name[:40]!r}); materialize the plan again")
        return int(batch)

    def _url(self, path: str) -> str:
        url = str(self.fs.unstrip_protocol(path))
        return path if url.startswith("file://") else f"{_SCHEME}:{url}"

    def _read(self, shards: list[str]) -> Iterator[tuple[int, list[bytes]]]:
        """Batch by batch: its number and its pictures."""
        shard = shards[0]

        def numbered() -> Iterator[tuple[int, bytes]]:
            nonlocal shard
            urls = [self._url(path) for path in shards]
            for sample in webdataset.WebDataset(urls, shardshuffle=False, nodesplitter=_every_node):
                shard = sample["__url__"]
                pictures = [sample[key] for key in sample if key[:2] != "__" and key not in _NO_PICTURES]
                for picture in pictures:
                    yield self._batch_of(shard, sample["__key__"]), picture

        try:
            for batch, rows in groupby(numbered(), key=lambda row: row[0]):
                yield batch, [picture for _, picture in rows]
        except (tarfile.TarError, ValueError) as error:
            # webdataset adds the file it was at to what it raises.
            place = error.args[-1] if len(error.args) > 1 else shard
            raise InputError(f"{place}: damaged ({error.args[0]}); materialize the plan again") from None
