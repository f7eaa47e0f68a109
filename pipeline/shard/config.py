"""What ``fnpipe shard`` is asked: its flags, and what they allow."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from fnpipe.pipeline.errors import InputError
from fnpipe.pipeline.flags import flag
from fnpipe.pipeline.machine.limits import MAX_PIXELS


@dataclass(frozen=True, kw_only=True)
class ShardConfig:
    """How `fnpipe shard` works: one field per flag.

    Attributes:
        captions: what a text stands for, one of `texts.WAYS`; None: one caption.
        holdout: a share of the pictures below 1, or their number, drawn as the split ``test``.
        validation: as much again for the split ``validation``, by which training chooses its best weights.
        shuffle_captions: a share of the train pairs that get each other's captions, for experiments with noisy data;
            ``shuffled.parquet`` lists them, and the tars keep what the source says.
        shards: an fsspec URL for the tars; None puts them into the workspace.
        in_place: index existing tars where they lie; ``verify`` then decodes every image instead of reading headers.
    """

    format: str = flag("auto", "auto, albef, coco, csv, tsv, parquet, hf, folder or webdataset.")
    image_root: str | None = flag(
        None, "What image paths are relative to and must not leave; default: where the source lies."
    )
    image_column: str | None = flag(None, "Field or column of the image; a number without header.")
    caption_column: str | None = flag(None, "Field or column of the caption; json:FIELD for tars and text files.")
    captions: str | None = flag(
        None,
        "What a text stands for: one caption, one on every line, or a list as JSON or Python writes it.",
        metavar="text|lines|json",
        shown="text",
    )
    header: bool = flag(True, "The table has none; caption and image are columns 0 and 1 by default.")
    split: str | None = flag(None, "Take only this split, as a column, folders or file names tell it.")
    holdout: float | None = flag(None, "Draw a share (below 1) or a number of the pictures as the split 'test'.")
    validation: float | None = flag(
        None, "As --holdout, as the split 'validation', by which train keeps its best weights.", metavar="N"
    )
    shuffle_captions: float | None = flag(
        None, "Give this share of the train pairs each other's captions: wrong pairs, for experiments.", metavar="F"
    )
    max_pixels: int = flag(MAX_PIXELS, "Leave larger images out, by their header.", shown=f"{MAX_PIXELS:,}")
    images_per_shard: int = flag(1000, "Images in one tar.")
    resize: int | None = flag(None, "Shrink to this shorter side, as JPEG of quality 90; default: original bytes.")
    seed: int = flag(0, "Of the order, and of what is held out.", after="workers")
    in_place: bool = flag(False, "Index existing tars where they lie, without copying a byte.")
    verify: bool = flag(False, "With --in-place: decode every image, not only its header.")
    follow_links: bool = flag(False, "Let symbolic links lead out of the image root.")
    shards: str | None = flag(None, "Directory or fsspec URL for the tars.")
    workers: int | None = flag(None, "Processes; default: one per processor.")

    def __post_init__(self) -> None:
        for name, value in (
            ("--max-pixels", self.max_pixels),
            ("--images-per-shard", self.images_per_shard),
            ("--resize", self.resize),
            ("--workers", self.workers),
        ):
            if value is not None and value < 1:
                raise InputError(f"{name} {value}: at least 1")
        from fnpipe.pipeline.sources.captions import require_way  # pyarrow loads here, and not for the help

        require_way(self.captions)
        for option, amount in (("--holdout", self.holdout), ("--validation", self.validation)):
            if amount is not None and (not amount > 0 or (amount > 1 and amount % 1)):
                raise InputError(f"{option} {amount:g}: a share between 0 and 1, or a whole number of pictures")
        if self.shuffle_captions is not None and not 0 < self.shuffle_captions <= 1:
            raise InputError(f"--shuffle-captions {self.shuffle_captions:g}: a share above 0, at most 1")
        if not 0 <= self.seed < 1 << 63:
            raise InputError(f"--seed {self.seed}: from 0 to 2^63 - 1")
        if self.verify and not self.in_place:
            raise InputError("--verify goes with --in-place; without it every image is decoded anyway")
        if self.in_place and (self.resize is not None or self.shards is not None):
            raise InputError("--in-place copies nothing, so it takes neither --resize nor --shards")

    def params(self) -> dict[str, Any]:
        """Everything that changes the bytes of the result; keys that 0.1.0 did not have only where they are given."""
        left_out = {"workers", *(["validation"] if self.validation is None else [])}
        return {name: value for name, value in asdict(self).items() if name not in left_out}

    @property
    def held_out(self) -> dict[str, float]:
        """The splits that are drawn, each with its share of the pictures or their number."""
        from fnpipe.pipeline.workspace.schemas import TEST, VALIDATION  # pyarrow loads here, and not for the help

        amounts = {TEST: self.holdout, VALIDATION: self.validation}
        return {split: amount for split, amount in amounts.items() if amount is not None}
