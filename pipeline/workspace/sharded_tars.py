"""What a sharding knows of its tars, and whether a tar is still the one that the tables were made of.

``fnpipe.json`` holds under ``tars`` an object for every shard: ``size`` in bytes; of a tar that fnpipe wrote, the name
of its ``first`` member and the ``crc32`` of all of its bytes; of a local tar indexed in place, ``mtime_ns``.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fnpipe.pipeline.errors import InputError
from fnpipe.pipeline.files.urls import is_remote, local_path, size_of
from fnpipe.pipeline.images.decode import decode_or_none
from fnpipe.pipeline.machine.limits import MAX_PIXELS
from fnpipe.pipeline.workspace.pairs import Pairs
from fnpipe.pipeline.workspace.pictures import Pictures

_NAME_BYTES = 100
# Pictures of a tar that are compared where it was written to at another time, or copied, since it was indexed.
_COMPARED = 32


def describe_in_place(url: str) -> dict[str, int]:
    """What is recorded of a tar that stays where it lies; nothing of a remote one, which would cost a request."""
    if is_remote(url):
        return {}
    facts = os.stat(local_path(url))
    return {"size": facts.st_size, "mtime_ns": facts.st_mtime_ns}


@dataclass(frozen=True)
class ShardedTars:
    """The tars of a finished sharding.

    Attributes:
        root: the workspace. manifest: its ``fnpipe.json``.
    """

    root: Path
    manifest: Mapping[str, Any]
    pairs: Pairs

    @property
    def max_pixels(self) -> int:
        """The limit under which the pictures were kept: every stage decodes under the same."""
        return int(self.manifest.get("params", {}).get("max_pixels", MAX_PIXELS))

    def url(self, shard: int) -> str:
        """Where the tar of ``shard`` lies, there or not: an absolute local path, or an fsspec URL."""
        url = str(self.manifest["shards"][shard])
        return url if "://" in url or url.startswith("/") else str((self.root / url).absolute())

    def recorded(self, shard: int) -> dict[str, Any]:
        """What the manifest records of a tar, or, in older workspaces, of the input at its place."""
        tars = self.manifest.get("tars")
        if isinstance(tars, list) and shard < len(tars) and isinstance(tars[shard], dict):
            return dict(tars[shard])
        url, inputs = self.manifest["shards"][shard], self.manifest.get("inputs")
        known = (facts for facts in inputs if isinstance(facts, dict)) if isinstance(inputs, list) else ()
        return next((dict(facts) for facts in known if facts.get("path") == url), {})

    def require_unchanged(self, shard: int) -> None:
        """Refuse a tar that is not the one whose pictures the tables describe.

        It costs a look at the file's size and its first member; pictures are read only where the time is another.

        Raises:
            InputError: it is gone, or another.
        """
        url, facts = self.url(shard), self.recorded(shard)
        try:
            found = _found(url, facts)
        except (FileNotFoundError, NotADirectoryError):
            raise InputError(
                f"{url}: the shard is gone; bring it back, or shard again into another directory"
            ) from None
        for key in ("size", "first"):
            if key in facts and found[key] != facts[key]:
                raise _changed(url, f"its {_WORDS[key]} is {_shown(found[key])}, not {_shown(facts[key])}")
        if "mtime_ns" in facts and found["mtime_ns"] != facts["mtime_ns"]:
            wrong = self.differing_pictures(shard, _COMPARED)
            if wrong:
                raise _changed(url, f"the picture {wrong[0]!r} is another")

    def differing_pictures(self, shard: int, most: int | None = None) -> list[str]:
        """The keys of the pictures whose bytes are not those that the tables have the digest of.

        Args:
            most: compare so many, spread evenly; None for all.
        """
        pairs = self.pairs.read(["image_id", "key", "image_sha256", "image_offset", "image_size"], shard=shard)
        rows = np.flatnonzero(np.diff(pairs["image_id"].to_numpy(), prepend=-1))
        if most is not None and most < len(rows):
            rows = rows[np.unique(np.linspace(0, len(rows) - 1, most).astype(int))]
        wrong: list[str] = []
        may_differ = self._written_anew(shard)
        for some in np.array_split(rows, -(-len(rows) // _COMPARED) or 1):
            table = pairs.take(some)
            offset, size = table["image_offset"].to_numpy(), table["image_size"].to_numpy()
            data = _encoded(Pictures.in_tar(self.url(shard), offset, size))
            digests = [None if picture is None else hashlib.sha256(picture).hexdigest() for picture in data]
            named = zip(table["key"].to_pylist(), table["image_sha256"].to_pylist(), digests, data, strict=True)
            wrong += [key for key, before, now, picture in named if before != now and not may_differ(picture)]
        return wrong

    def _written_anew(self, shard: int) -> Callable[[bytes | None], bool]:
        """Which bytes may be others than the source's though the tar has no checksum: those that were encoded anew.

        Without ``--resize`` these are PNG, which carries checksums of its own.
        """
        params = self.manifest["params"]
        if params.get("in_place") or "crc32" in self.recorded(shard):
            return lambda picture: False
        shrunk = params.get("resize") is not None
        return lambda picture: (
            picture is not None
            and (shrunk or picture.startswith(b"\x89PNG"))
            and decode_or_none(picture, max_pixels=self.max_pixels) is not None
        )


_WORDS = {"size": "size in bytes", "first": "first member"}


def _found(url: str, facts: Mapping[str, Any]) -> dict[str, Any]:
    """The same facts of the tar as it is now."""
    if is_remote(url):
        return {**facts, **({"size": size_of(url)} if "size" in facts else {})}
    found: dict[str, Any] = {**facts, **describe_in_place(url)}
    if "first" in facts:
        with open(local_path(url), "rb") as file:
            found["first"] = file.read(_NAME_BYTES).split(b"\0")[0].decode("ascii", "replace")
    return found


def _shown(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else repr(value)


def _changed(url: str, what: str) -> InputError:
    return InputError(
        f"{url}: not the tar that was sharded ({what}); bring that one back, or run `fnpipe shard` again with "
        "--overwrite"
    )


def _encoded(pictures: Pictures) -> list[bytes] | list[None]:
    try:
        return pictures.read()
    except OSError as error:
        if error.errno is not None:
            raise
        return [None] * len(pictures)  # the file ends before
