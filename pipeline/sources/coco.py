"""COCO's captions file (``images`` and ``annotations``) and Karpathy's split file (``images`` with ``sentences``)."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from fnpipe.pipeline.errors import InputError, counted
from fnpipe.pipeline.files.tables import BATCH_ROWS, TablePacker
from fnpipe.pipeline.files.text import open_text
from fnpipe.pipeline.files.urls import parent
from fnpipe.pipeline.sources.json_rows import JsonStream, shown
from fnpipe.pipeline.sources.rows import MISSING, RowBuilder
from fnpipe.pipeline.sources.source import ReadOptions, Source, Tools
from fnpipe.pipeline.sources.splits import split_of_file


def read_coco(source: Source, how: ReadOptions, rows: RowBuilder, tools: Tools) -> None:
    """Read either form: a row is an annotation of COCO's, or an image of Karpathy's with all its sentences."""
    source.root = how.image_root or parent(source.path)
    source.inputs.append(source.path)
    document = _Document(source.path, how, rows)
    with open_text(source.path) as text:
        stream = JsonStream(text, source.path)
        if stream.peek() != "{":
            raise InputError(f"{source.path}: not COCO's form: an object with 'images' and 'annotations' is expected")
        for key in stream.members():
            document.read(key, stream)
        stream.end()
    document.finish(source)


class _Document:
    """The parts of the file as they come by, in any order; ids and captions are kept as Arrow arrays."""

    def __init__(self, path: str, how: ReadOptions, rows: RowBuilder) -> None:
        self._path = path
        self._caption = how.caption_column or "caption"
        self._image = how.image_column or "file_name"
        self._split = split_of_file(path)
        self._rows = rows
        self._keys: list[str] = []
        self._images = TablePacker(_texts("id", "file"))
        self._annotations = TablePacker(_texts("image_id", "caption", "id"))
        self._sentences = False

    def read(self, key: str, stream: JsonStream) -> None:
        self._keys.append(key)
        if stream.peek() != "[" or key not in ("images", "annotations"):
            stream.value()
            return
        read = self._read_image if key == "images" else self._read_annotation
        for entry in stream.items():
            read(entry)

    def _read_image(self, entry: Any) -> None:
        if not isinstance(entry, dict):
            if self._sentences:
                self._rows.bad("bad-row", "an image that is not an object", split=self._split)
        elif "sentences" in entry:
            self._sentences = True
            self._add_karpathy(entry)
        else:
            # An id is compared as JSON writes it, so that the text "5" is not the number 5.
            self._images.add((_text(entry.get("id")), _text(entry.get(self._image))))

    def _read_annotation(self, entry: Any) -> None:
        if not isinstance(entry, dict):
            self._annotations.add((None, shown(entry), None))
        else:
            image = _text(entry["image_id"]) if "image_id" in entry else None
            caption = entry.get(self._caption, MISSING)
            self._annotations.add((image, None if caption is MISSING else _text(caption), _text(entry.get("id"))))

    def _add_karpathy(self, entry: dict[str, Any]) -> None:
        split = entry.get("split")
        split = split if isinstance(split, str) and split else self._split
        name = entry.get("filename", MISSING)
        folder = entry.get("filepath")
        if isinstance(name, str) and isinstance(folder, str) and folder:
            name = f"{folder}/{name}"
        sentences = entry["sentences"]
        captions: Any = MISSING
        if isinstance(sentences, list):
            captions = [part.get("raw") if isinstance(part, dict) else part for part in sentences]
        self._rows.add(name, captions, split=split)

    def finish(self, source: Source) -> None:
        if self._sentences:
            left = len(self._annotations.table())
            source.say([f"{left:,} annotations were left: the captions are the images' sentences"] if left else [])
            return
        missing = next((key for key in ("images", "annotations") if key not in self._keys), None)
        if missing:
            raise InputError(
                f"{self._path}: expected a list of rows, or an object with 'images' and 'annotations'; "
                f"found an object with keys {self._keys[:20]}"
            )
        images, annotations = self._images.table(), self._annotations.table()
        self._refuse_repeated_ids(images["id"])
        ids = images["id"].combine_chunks()
        found = pc.index_in(annotations["image_id"], value_set=ids)
        for start in range(0, len(annotations), BATCH_ROWS):
            part = annotations.slice(start, BATCH_ROWS)
            where = found.slice(start, BATCH_ROWS)
            files = pc.take(images["file"], where)
            self._add_annotations(part, where.to_pylist(), files.to_pylist())
        self._rows.require_fields(self._path, self._image, self._caption)
        alone = len(images) - len(pc.unique(found.drop_null()))
        if alone:
            source.say([f"{counted(alone, 'image', 'images')} without a caption"])

    def _add_annotations(self, part: pa.Table, where: list[int | None], files: list[str | None]) -> None:
        columns = (part["image_id"].to_pylist(), part["caption"].to_pylist(), part["id"].to_pylist())
        for image_id, caption, annotation, index, file in zip(*columns, where, files, strict=True):
            if annotation is None:
                self._rows.bad("bad-row", f"an annotation that is not an object but {caption}", split=self._split)
            elif image_id is None:
                self._rows.bad("missing-field", f"annotation {annotation} has no image_id", split=self._split)
            elif index is None or file is None:
                detail = f"annotation {annotation}: no image has the id {image_id}"
                self._rows.bad("orphan-annotation", detail, split=self._split)
            else:
                text = MISSING if caption is None else json.loads(caption)
                self._rows.add(json.loads(file), text, split=self._split)

    def _refuse_repeated_ids(self, ids: pa.ChunkedArray) -> None:
        counts = pc.value_counts(ids)
        repeated = counts.filter(pc.greater(counts.field("counts"), 1))
        if len(repeated):
            raise InputError(
                f"{self._path}: {repeated[0]['counts']} images have the id {repeated[0]['values']}; "
                "annotations of it could mean either: give each image its own"
            )


def _text(value: Any) -> str:
    """``value`` as JSON; what is nested too deeply to be written again was no id, path or caption anyway."""
    try:
        return json.dumps(value)
    except RecursionError:
        return "[]"


def _texts(*names: str) -> pa.Schema:
    return pa.schema([(name, pa.large_string()) for name in names])
