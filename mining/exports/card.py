"""The README.md of an export: what it holds, where it comes from, and how it is loaded."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

# What `datasets.load_dataset(DIR, NAME)` finds, the default first.
_CONFIGS = {
    "hf": {"default": "data"},
    "sentence-transformers": {name: name for name in ("triplets", "pairs", "about-triplets", "about-pairs")},
}
_TITLE = {"label-studio": "Mined captions to be judged by people"}
_SOURCES = {
    "recorded": "as the data set has it",
    "discriminator": "an image-text matching model found that the caption is true of the image as well",
    "identity": "the same picture with another record's caption",
    "review": "people said that the caption is true of the image as well",
}
_SIZES = ((1_000, "n<1K"), (10_000, "1K<n<10K"), (100_000, "10K<n<100K"), (1_000_000, "100K<n<1M"))

_LOADING = {
    "hf": """\
from datasets import load_dataset

data = load_dataset({path!r}, split="train")
""",
    "sentence-transformers": """\
from datasets import load_dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer
from sentence_transformers.losses import MultipleNegativesRankingLoss

model = SentenceTransformer("clip-ViT-B-32")
triplets = load_dataset({path!r}, "triplets", split="train")
trainer = SentenceTransformerTrainer(model=model, train_dataset=triplets, loss=MultipleNegativesRankingLoss(model))
trainer.train()
""",
    "fiftyone": """\
import fiftyone as fo

kind = fo.types.FiftyOneImageClassificationDataset
data = fo.Dataset.from_dir({path!r}, dataset_type=kind, label_field="captions")
fo.launch_app(data)
""",
}
# Tasks name pictures by their path below the document root.
_LABEL_STUDIO = """\
export LABEL_STUDIO_LOCAL_FILES_SERVING_ENABLED=true LABEL_STUDIO_LOCAL_FILES_DOCUMENT_ROOT={path}
label-studio start
"""


def card(
    form: str, path: str, images: int, captions: Mapping[str, int], rows: Mapping[str, int], facts: Sequence[str]
) -> str:
    """The text of README.md.

    Args:
        path: where the export lies. captions: how many, by source. rows: by file.
        facts: sentences on how it came about and what to know of it.
    """
    parts = [
        f"# {_TITLE.get(form, 'Image-text pairs with mined positives')}, for {form}",
        f"{images:,} images. Captions by source: {_listed(captions)}." if captions else f"{images:,} images.",
        "\n".join(f"*{source}*: {_SOURCES[source]}." for source in captions),
        "\n".join(f"- {fact}" for fact in facts),
        "| files | rows |\n| --- | --- |\n" + "\n".join(f"| {name} | {count:,} |" for name, count in rows.items()),
        f"```{'python' if form in _LOADING else 'sh'}\n{loading(form, path).rstrip()}\n```",
        "The pictures and captions remain under the licence of the data set that they come from.",
    ]
    return _front_matter(form, images) + "\n\n".join(part for part in parts if part) + "\n"


def loading(form: str, path: str) -> str:
    """The lines that load the export; for open_clip the command that trains on it, for Label Studio its server's."""
    if form == "label-studio":
        return _LABEL_STUDIO.format(path=shlex.quote(path))
    if form in _LOADING:
        return _LOADING[form].format(path=path)
    from fnpipe.mining.exports.open_clip import training_command

    return training_command(path)


def _front_matter(form: str, images: int) -> str:
    if form not in _CONFIGS:
        return ""
    configs: list[dict[str, Any]] = [
        {"config_name": name, "data_files": [{"split": "train", "path": f"{folder}/train-*.parquet"}]}
        for name, folder in _CONFIGS[form].items()
    ]
    configs[0]["default"] = True
    size = next((name for limit, name in _SIZES if images < limit), "n>1M")
    fields = {"configs": configs, "size_categories": [size], "tags": ["image-text", "false-negatives", "fnpipe"]}
    return f"---\n{yaml.safe_dump(fields, sort_keys=False)}---\n"


def _listed(captions: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {source}" for source, count in captions.items()) or "none"
