"""The exported answers of people: their columns and verdicts."""

from __future__ import annotations

import pyarrow as pa

# By code.
VERDICTS = ("no", "yes", "unsure")

# One row per combination and reviewer: the last answer.
REVIEWS_SCHEMA = pa.schema(
    [
        ("image_id", pa.int64()),
        ("pair_id", pa.int64()),
        ("match_probability", pa.float32()),
        ("stratum", pa.int16()),
        ("reviewer", pa.string()),
        ("verdict", pa.dictionary(pa.int32(), pa.string())),
        ("answered_at", pa.timestamp("us", "UTC")),
    ]
)
