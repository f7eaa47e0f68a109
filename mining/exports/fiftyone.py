"""FiftyOne's image classification data set: a picture with all its captions as labels, mined ones with their p."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from fnpipe.mining.exports.records import ImageRecord

LABELS, DATA = "labels.json", "data"
_PER_FOLDER = 1000


def write_fiftyone(records: Iterator[ImageRecord], directory: Path) -> tuple[dict[str, int], list[str]]:
    """Write ``data/`` (a thousand pictures to a folder) and ``labels.json``, picture by picture.

    Returns:
        The rows by file, and no notes.
    """
    captions = 0
    with (directory / LABELS).open("w", encoding="utf-8") as file:
        file.write('{"labels": {')
        for number, record in enumerate(records):
            # Pictures go by their path below data/ without the ending.
            stem = f"{record.image_id // _PER_FOLDER:05d}/{record.image_id:08d}"
            path = directory / DATA / stem.partition("/")[0] / record.name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(record.data)
            labels = [
                {
                    "label": caption.text,
                    "confidence": caption.match_probability,
                    "attributes": {"source": caption.source, "similarity": caption.similarity},
                }
                for caption in record.true
            ]
            captions += len(labels)
            file.write(f"{',' if number else ''}\n{json.dumps(stem)}: {json.dumps(labels, ensure_ascii=False)}")
        file.write("\n}}\n")
    return {LABELS: captions}, []
