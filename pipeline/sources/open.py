"""From the command line's SOURCE arguments to sources: what form each has, what it stands for, what it is called."""

from __future__ import annotations

from collections.abc import Sequence

from fnpipe.pipeline.errors import InputError, nearest
from fnpipe.pipeline.files.text import open_unpacked, peek
from fnpipe.pipeline.files.urls import HUB, exists, expand_braces, is_directory, is_remote, walk
from fnpipe.pipeline.sources.coco import read_coco
from fnpipe.pipeline.sources.csv import read_csv, read_tsv
from fnpipe.pipeline.sources.folder import metadata_files, read_folder
from fnpipe.pipeline.sources.huggingface import has_configurations, is_saved_dataset, read_hf
from fnpipe.pipeline.sources.json_rows import read_json, sniff_json
from fnpipe.pipeline.sources.parquet import parquet_members, read_parquet
from fnpipe.pipeline.sources.source import Reader, Source
from fnpipe.pipeline.sources.webdataset import TAR_NAMES, read_webdataset, tar_members

READERS: dict[str, Reader] = {
    "albef": read_json,
    "coco": read_coco,
    "csv": read_csv,
    "tsv": read_tsv,
    "parquet": read_parquet,
    "hf": read_hf,
    "folder": read_folder,
    "webdataset": read_webdataset,
}
FORMATS = ("auto", *READERS)

_JSON_NAMES = (".json", ".jsonl", ".ndjson")
# Which formats may stand for several files, by brace range or folder.
_MANY_FILES = ("webdataset", "parquet")
# Which formats are tables of text, which may lack a header.
_TABLES = ("csv", "tsv")


def open_sources(paths: Sequence[str], form: str, *, header: bool = True) -> list[Source]:
    """The sources of a run, their forms found out where ``form`` is ``auto``; nothing is read yet.

    Raises:
        InputError: a path that is not there or cannot be reached, a form that cannot be told, an unknown form, no
            table where there is said to be no ``header``.
    """
    if form not in FORMATS:
        raise InputError(f"--format {form}: one of {', '.join(FORMATS)}{nearest(form, list(FORMATS))}")
    sources = [_reach(path, name, form) for path, name in zip(paths, source_names(paths), strict=True)]
    if not header and not any(source.format in _TABLES for source in sources):
        raise InputError(f"{sources[0].path}: {sources[0].format}, which has no header line; leave --no-header out")
    return sources


def _reach(path: str, name: str, form: str) -> Source:
    if not is_remote(path):
        return _open(path, name, form)
    try:
        return _open(path, name, form)
    except InputError:
        raise
    except Exception as error:
        # Every remote file system has exceptions of its own for "no such host", "no such bucket", "not allowed".
        raise InputError(f"{path}: cannot be reached ({type(error).__name__}: {error})") from error


def source_names(paths: Sequence[str]) -> list[str]:
    """What each source is called in the tables: the shortest end of its path that no other source shares."""
    parts = [path.rstrip("/").split("/") for path in paths]
    names = []
    for i, mine in enumerate(parts):
        others = parts[:i] + parts[i + 1 :]
        length = next((n for n in range(1, len(mine)) if all(mine[-n:] != other[-n:] for other in others)), len(mine))
        names.append("/".join(mine[-length:]))
    repeated = next((name for name in names if names.count(name) > 1), None)
    if repeated is not None:
        raise InputError(f"{repeated}: given twice; name each source once")
    return names


def _open(path: str, name: str, form: str) -> Source:
    if path.startswith(HUB):
        if form not in ("auto", "hf"):
            raise InputError(f"{path}: a data set on the Hub, which --format {form} cannot be; leave it out")
        return Source(path, name, "hf")
    # A file that is there is taken by its name, before any pattern in it is looked at.
    if exists(path):
        if is_directory(path):
            return _open_directory(path, name, form)
        return Source(path, name, form if form != "auto" else _file_form(path), members=[path])
    members = expand_braces(path)
    if members == [path]:
        raise InputError(f"{path}: no such file or directory")
    missing = next((member for member in members if not exists(member)), None)
    if missing is not None:
        raise InputError(f"{path}: {missing} is named by the range but is not there")
    form = form if form != "auto" else _file_form(members[0])
    if form not in _MANY_FILES:
        raise InputError(f"{path}: a range of files can be tars or Parquet; give {form} files one by one")
    return Source(path, name, form, members=members)


def _open_directory(path: str, name: str, form: str) -> Source:
    if form == "auto":
        form = _directory_form(path)
    members = {"webdataset": tar_members, "parquet": parquet_members}.get(form, lambda _: [])(path)
    if form in _MANY_FILES and not members:
        raise InputError(f"{path}: no {'tars' if form == 'webdataset' else 'Parquet files'} in this directory")
    if form not in (*_MANY_FILES, "folder", "hf"):
        raise InputError(f"{path}: a directory; --format {form} needs a file")
    return Source(path, name, form, members=members)


def _directory_form(path: str) -> str:
    if is_saved_dataset(path) or has_configurations(path):
        return "hf"
    if metadata_files(path):
        return "folder"
    if tar_members(path):
        return "webdataset"
    if parquet_members(path):
        return "parquet"
    return "hf" if any(name.endswith(".arrow") for name in walk(path)) else "folder"


def _file_form(path: str) -> str:
    plain = path.lower().removesuffix(".gz")
    if plain.endswith(TAR_NAMES) or path.lower().endswith(TAR_NAMES):
        return "webdataset"
    if plain.endswith(_JSON_NAMES):
        return _json_form(path)
    for ending, form in ((".csv", "csv"), (".tsv", "tsv"), (".parquet", "parquet"), (".txt", "csv")):
        if plain.endswith(ending):
            return form
    return _form_by_content(path)


def _json_form(path: str) -> str:
    return "coco" if sniff_json(path) == "object" else "albef"


def _form_by_content(path: str) -> str:
    with open_unpacked(path) as raw:
        start = peek(raw, 512)
    if start[:4] == b"PAR1":
        return "parquet"
    if start[257:262] == b"ustar":
        return "webdataset"
    if start.lstrip()[:1] in (b"[", b"{"):
        return _json_form(path)
    raise InputError(f"{path}: cannot tell what this is; say it with --format ({', '.join(READERS)})")
