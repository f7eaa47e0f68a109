"""Reading the images that rows point at: files under an image root that must not be left, or ranges of larger files."""

from __future__ import annotations

import errno
import os
import posixpath
import stat
from collections.abc import Sequence
from dataclasses import dataclass, field

from fnpipe.pipeline.files.ranges import read_ranges
from fnpipe.pipeline.files.text import other_forms
from fnpipe.pipeline.files.urls import filesystem, is_remote, local_path
from fnpipe.pipeline.images.decode import BadImage

# A path that cannot name a file, as opposed to a disk or a network that failed.
_NO_SUCH_FILE = (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG, errno.EACCES, errno.EINVAL)

# In the place of a file's number: a path leads to the bytes, which are a file of their own.
WHOLE_FILE = -1


@dataclass(frozen=True)
class ImageRequest:
    """Where the bytes of one image lie: ``file`` is WHOLE_FILE, or a number among the files of its source."""

    image: str
    file: int = WHOLE_FILE
    offset: int = 0
    size: int = 0


@dataclass
class ImageReader:
    """Reads the images of one source.

    Attributes:
        root: what paths are relative to; a path that leads out of it is refused.
        files: the files that embedded images lie in.
        follow_links: let symbolic links lead out of the root.
    """

    root: str
    files: Sequence[str] = ()
    follow_links: bool = False
    _inside: dict[str, bool] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self._remote = is_remote(self.root)
        if not self._remote:
            self._base = os.path.abspath(local_path(self.root))
            self._real = os.path.realpath(self._base)

    def read(self, requests: Sequence[ImageRequest]) -> list[bytes | BadImage]:
        """The bytes of each image, or why they cannot be had.

        Raises:
            OSError: the disk or the network failed, which is no fault of the row.
        """
        whole = [i for i, request in enumerate(requests) if request.file == WHOLE_FILE]
        ranges = [i for i, request in enumerate(requests) if request.file != WHOLE_FILE]
        out: list[bytes | BadImage] = [b""] * len(requests)
        paths = [requests[i].image for i in whole]
        for i, data in zip(whole, self._read_remote(paths) if self._remote else map(self._read, paths), strict=True):
            out[i] = data
        wanted = [requests[i] for i in ranges]
        urls = [self.files[request.file] for request in wanted]
        offsets, sizes = [request.offset for request in wanted], [request.size for request in wanted]
        for i, data in zip(ranges, read_ranges(urls, offsets, sizes), strict=True):
            out[i] = data
        return out

    def _read(self, image: str) -> bytes | BadImage:
        found = self._read_named(image)
        if isinstance(found, BadImage) and found.reason == "missing-file":
            for other in other_forms(image):
                again = self._read_named(other)
                if not (isinstance(again, BadImage) and again.reason == "missing-file"):
                    return again
        return found

    def _read_named(self, image: str) -> bytes | BadImage:
        path = os.path.normpath(os.path.join(self._base, image))
        try:
            if not self._stays_inside(path):
                return BadImage("path-escape", f"{path} lies outside the image root {self._base}")
            return self._read_file(path)
        except ValueError:  # a NUL in the path
            return BadImage("missing-file", f"{path!r} is no path")
        except OSError as error:
            if error.errno in _NO_SUCH_FILE:
                return BadImage("missing-file", f"{path}: {os.strerror(error.errno).lower()}")
            if error.errno in (errno.ENXIO, errno.ELOOP):
                return BadImage("not-a-file", f"{path}: {os.strerror(error.errno).lower()}")
            raise

    def _read_file(self, path: str) -> bytes | BadImage:
        # A link is opened only after a look at where it leads; a pipe must not be waited for.
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
        try:
            handle = os.open(path, flags | (0 if self.follow_links else os.O_NOFOLLOW))
        except OSError as error:
            if error.errno != errno.ELOOP or self.follow_links:
                raise
            if not self._is_real_inside(path):
                return BadImage("path-escape", f"{path} is a link that leads out of the image root (--follow-links)")
            handle = os.open(path, flags)
        try:
            facts = os.fstat(handle)
            if not stat.S_ISREG(facts.st_mode):
                return BadImage("not-a-file", f"{path} is a {_kind(facts.st_mode)}")
            return _read_all(handle, facts.st_size)
        finally:
            os.close(handle)

    def _stays_inside(self, path: str) -> bool:
        prefix = self._base if self._base.endswith("/") else self._base + "/"
        if not path.startswith(prefix):
            return path == self._base or self._is_real_inside(path)
        if self.follow_links:
            return True
        folder = os.path.dirname(path)
        known = self._inside.get(folder)
        if known is None:
            known = self._inside[folder] = self._is_real_inside(folder)
        return known

    def _is_real_inside(self, path: str) -> bool:
        real = os.path.realpath(path)
        return os.path.commonpath([real, self._real]) == self._real

    def _read_remote(self, images: list[str]) -> list[bytes | BadImage]:
        if not images:
            return []
        found = self._read_remote_named(images)
        for i, image in enumerate(images):
            for other in other_forms(image):
                if isinstance(bad := found[i], BadImage) and bad.reason == "missing-file":
                    (again,) = self._read_remote_named([other])
                    found[i] = bad if isinstance(again, BadImage) and again.reason == "missing-file" else again
        return found

    def _read_remote_named(self, images: list[str]) -> list[bytes | BadImage]:
        fs, base = filesystem(self.root)
        # Some file systems keep the scheme, whose slashes are no detour.
        scheme, separator, folder = base.rpartition("://")
        paths = [scheme + separator + posixpath.normpath(posixpath.join(folder, image)) for image in images]
        inside = [path == base or path.startswith(base.rstrip("/") + "/") for path in paths]
        found = fs.cat([path for path, fine in zip(paths, inside, strict=True) if fine], on_error="return")
        # fsspec answers a single path with its bytes alone.
        contents = found if isinstance(found, dict) else dict.fromkeys(paths, found)
        return [
            _remote_content(path, contents.get(path))
            if fine
            else BadImage("path-escape", f"{path} lies outside the image root {self.root}")
            for path, fine in zip(paths, inside, strict=True)
        ]


def _remote_content(path: str, content: bytes | Exception | None) -> bytes | BadImage:
    if isinstance(content, bytes):
        return content
    if isinstance(content, IsADirectoryError):
        return BadImage("not-a-file", f"{path} is a directory")
    if content is None or isinstance(content, FileNotFoundError | KeyError):
        return BadImage("missing-file", f"{path}: no such file")
    raise content


def _read_all(handle: int, size: int) -> bytes:
    data = os.read(handle, size + 1)
    if len(data) == size:
        return data
    parts = [data]
    while part := os.read(handle, 1 << 20):
        parts.append(part)
    return b"".join(parts)


def _kind(mode: int) -> str:
    kinds = ((stat.S_ISDIR, "directory"), (stat.S_ISFIFO, "named pipe"), (stat.S_ISSOCK, "socket"))
    return next((name for test, name in kinds if test(mode)), "device")
