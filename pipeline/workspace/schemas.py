"""The tables of a workspace: their columns, and the names of files and splits."""

from __future__ import annotations

import pyarrow as pa

PAIRS_SCHEMA = pa.schema(
    [
        ("pair_id", pa.int64()),
        ("image_id", pa.int64()),
        ("shard", pa.int32()),
        ("key", pa.string()),
        ("caption", pa.string()),
        ("source", pa.string()),
        ("split", pa.string()),
        ("width", pa.int32()),
        ("height", pa.int32()),
        ("image_sha256", pa.string()),
        ("image_offset", pa.int64()),
        ("image_size", pa.int64()),
    ]
)

# One row per image, in image_id order; ``image`` is the path as the source gives it.
IMAGES_SCHEMA = pa.schema(
    [("image_id", pa.int64()), ("key", pa.string()), ("source", pa.string()), ("image", pa.string())]
)

BAD_SCHEMA = pa.schema([("image_id", pa.int64()), ("pair_id", pa.int64()), ("reason", pa.string())])

# Where parts lie until the last pass has made tables of them.
PARTS = "parts"

QUARANTINE_SCHEMA = pa.schema(
    [
        ("source", pa.string()),
        ("row", pa.int64()),
        ("image", pa.string()),
        ("reason", pa.string()),
        ("detail", pa.string()),
    ]
)

SHUFFLED = "shuffled.parquet"

# One row per wrong pair: whose caption it was given.
SHUFFLED_SCHEMA = pa.schema(
    [
        ("pair_id", pa.int64()),
        ("image_id", pa.int64()),
        ("caption_pair_id", pa.int64()),
        ("caption_image_id", pa.int64()),
    ]
)

TRAIN, VALIDATION = "train", "validation"
# The split to evaluate on, where there is one. Weights are never chosen by it: what it says of them would be too good.
TEST = "test"
