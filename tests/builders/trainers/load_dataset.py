"""The first row of an export as whatever `datasets` is found loads it: ``DATA NAME CACHE``."""

from __future__ import annotations

import json
import sys

import datasets

if __name__ == "__main__":
    data, name, cache = sys.argv[1:]
    first = datasets.load_dataset(data, name, split="train", cache_dir=cache)[0]
    seen = {
        key: list(value.convert("RGB").getpixel((0, 0))) if hasattr(value, "getpixel") else value
        for key, value in first.items()
    }
    print(json.dumps({"version": datasets.__version__, "first": seen}))
