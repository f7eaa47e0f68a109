"""open_clip's CSV: one row per true caption, a second file with one row per image, and the pictures as files."""

from __future__ import annotations

import csv
import hashlib
import shlex
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from fnpipe.mining.exports.records import RECORDED, Caption, ImageRecord

ALL, ONE = "pairs.csv", "one-per-image.csv"
IMAGES = "images"
_PER_FOLDER = 1000
_BATCH = 1024

# What `pandas.read_csv`, by which open_clip reads, takes for a missing value.
_MISSING = frozenset(
    ("null", "NULL", "NA", "N/A", "n/a", "<NA>", "None", "nan", "NaN", "-nan", "-NaN", "#N/A", "#N/A N/A", "#NA")
) | {"-1.#IND", "1.#IND", "-1.#QNAN", "1.#QNAN"}
# No tokenizer sees it, as all of open_clip's join the words of a caption anew; pandas would strip a plain space
# off a number.
_NO_BREAK_SPACE = "\u00a0"


def write_open_clip(records: Iterator[ImageRecord], directory: Path, final: Path) -> tuple[dict[str, int], list[str]]:
    """Write ``pairs.csv``, ``one-per-image.csv`` and ``images/`` (a thousand to a folder).

    Both files are tab-separated: filepath (absolute, below ``final``), title, source.

    Returns:
        The rows by file, and the notes.
    """
    rng = np.random.default_rng(0)
    rows, protected = _Rows(), 0
    with (
        (directory / ALL).open("w", newline="", encoding="utf-8") as all_file,
        (directory / ONE).open("w", newline="", encoding="utf-8") as one_file,
    ):
        all_rows, one_row = (csv.writer(file, delimiter="\t", lineterminator="\n") for file in (all_file, one_file))
        for writer in (all_rows, one_row):
            writer.writerow(["filepath", "title", "source"])
        for record in records:
            path = str(final / _write_picture(directory, record))
            titles = [_title(caption.text) for caption in record.true]
            protected += sum(title != caption.text for title, caption in zip(titles, record.true, strict=True))
            lines = [(path, title, caption.source) for title, caption in zip(titles, record.true, strict=True)]
            chosen = int(rng.integers(len(lines)))
            all_rows.writerows(lines)
            one_row.writerow(lines[chosen])
            rows.add(record, chosen)
    notes = [rows.note()] if rows.texts else []
    if protected:
        notes.append(
            f"{protected:,} captions that pandas would read as a missing value or a number (such as null) end in a "
            "no-break space, which tokenizers drop"
        )
    return {ALL: len(rows.texts), ONE: len(rows.chosen)}, notes


def training_command(directory: str, file: str = ALL) -> str:
    """The shell line that trains open_clip on the export, from any directory."""
    data = shlex.quote(f"{directory}/{file}")
    return (
        f"python -m open_clip_train.main --dataset-type csv --train-data {data} "
        "--csv-img-key filepath --csv-caption-key title --model ViT-B-32"
    )


def _write_picture(directory: Path, record: ImageRecord) -> str:
    """Write the picture; its path from ``directory``."""
    path = Path(IMAGES) / f"{record.image_id // _PER_FOLDER:05d}" / record.name
    (directory / path).parent.mkdir(parents=True, exist_ok=True)
    (directory / path).write_bytes(record.data)
    return path.as_posix()


def _title(text: str) -> str:
    """The caption in a form that pandas gives back as the same text."""
    return text + _NO_BREAK_SPACE if text in _MISSING or _is_number(text) else text


def _is_number(text: str) -> bool:
    if text.lower() in ("true", "false"):
        return True
    try:
        float(text)
    except ValueError:
        return False
    return True


class _Rows:
    """The rows of both files as numbers, to count the known false negatives of random batches."""

    def __init__(self) -> None:
        self.images: list[int] = []
        self.texts: list[int] = []
        self.recorded: list[int] = []
        self.chosen: list[int] = []

    def add(self, record: ImageRecord, chosen: int) -> None:
        self.chosen.append(len(self.texts) + chosen)
        for caption in record.true:
            if caption.source == RECORDED:
                self.recorded.append(len(self.texts))
            self.images.append(record.image_id)
            self.texts.append(_number(caption))

    def note(self) -> str:
        images, texts = np.array(self.images), np.array(self.texts)
        batch = min(_BATCH, len(self.chosen))
        found = [
            known_false_negatives(images[rows], texts[rows], images, texts, batch)
            for rows in (np.arange(len(texts)), np.array(self.recorded), np.array(self.chosen))
        ]
        return (
            f"open_clip draws its batches at random and takes every other caption of a batch as a negative: of the "
            f"combinations known to be true, {batch:,} rows of {ALL} hold {found[0]:,.1f} on average ({found[1]:,.1f} "
            f"with the recorded pairs alone), of {ONE} {found[2]:,.1f}"
        )


def _number(caption: Caption) -> int:
    return int.from_bytes(hashlib.blake2b(caption.text.encode(), digest_size=8).digest(), "little", signed=True)


def known_false_negatives(
    row_images: np.ndarray, row_texts: np.ndarray, true_images: np.ndarray, true_texts: np.ndarray, batch: int
) -> float:
    """How many combinations of two rows of a random batch are true, on average.

    Args:
        row_images, row_texts: (n,) int64, the image and the caption of each row that batches are drawn from.
        true_images, true_texts: (m,) int64, the distinct true (image, caption); those of the rows are among them.
        batch: rows of a batch, drawn without replacement.

    Returns:
        The expected number of ordered pairs of different rows (a, b) of a batch with (image of a, caption of b) true.
    """
    n = len(row_images)
    if n < 2:
        return 0.0
    together = _counts(row_images, true_images) @ _counts(row_texts, true_texts)
    # Every row is true of itself, which is no pair of rows.
    return float(together - n) * batch * (batch - 1) / (n * (n - 1))


def _counts(values: np.ndarray, asked: np.ndarray) -> np.ndarray:
    """(m,) float64: how often each of ``asked`` is among ``values``."""
    known, counts = np.unique(values, return_counts=True)
    at = np.minimum(np.searchsorted(known, asked), len(known) - 1)
    return np.where(known[at] == asked, counts[at], 0).astype(np.float64)
