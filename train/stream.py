"""Materialised plans: the pictures of an epoch in batch order, as ``fnpipe group --materialize`` lays them down."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterator, Sequence
from typing import Any

import fsspec

from fnpipe.pipeline.errors import InputError
from fnpipe.pipeline.stage import Stage

_HEADER = 512


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
        shards = self.shards(epoch)
        firsts = [*(self._first_batch(shard) for shard in shards[1:]), None]
        for shard, next_first in zip(shards, firsts, strict=True):
            if next_first is not None and next_first <= number:
                continue
            for batch, pictures in self._read(shard):
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

    def _first_batch(self, shard: str) -> int:
        with self.fs.open(shard, "rb") as file:
            return self._batch_of(shard, file.read(_HEADER)[:100].split(b"\0")[0].decode("ascii", "replace"))

    def _batch_of(self, shard: str, name: str) -> int:
        batch = name.partition("-")[0]
        if not batch.isdigit():
            raise InputError(f"{shard}: damaged (it holds a member {name[:40]!r}); materialize the plan again")
        return int(batch)

    def _read(self, shard: str) -> Iterator[tuple[int, list[bytes]]]:
        """Batch by batch: its number and its pictures."""
        current, pictures = None, []
        try:
            with self.fs.open(shard, "rb") as file, tarfile.open(fileobj=file, mode="r|") as tar:
                for member in tar:
                    if member.name.endswith((".txt", ".json")):
                        continue
                    batch = self._batch_of(shard, member.name)
                    if current is not None and batch != current:
                        yield current, pictures
                        pictures = []
                    current = batch
                    content = tar.extractfile(member)
                    assert content is not None
                    pictures.append(content.read())
        except tarfile.TarError as error:
            raise InputError(f"{shard}: damaged ({error}); materialize the plan again") from None
        if current is not None:
            yield current, pictures
