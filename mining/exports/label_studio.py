"""Label Studio's tasks: the edges that `fnpipe review` would ask about, with their pictures and a labelling page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fnpipe.mining.edges.sample import edges_to_ask
from fnpipe.mining.exports.records import ImageRecord, Tally
from fnpipe.pipeline.images.decode import picture_ending
from fnpipe.pipeline.workspace.workspace import Stage, Workspace

TASKS, PAGE, IMAGES = "tasks.json", "page.xml", "images"
# Where Label Studio serves what lies below LABEL_STUDIO_LOCAL_FILES_DOCUMENT_ROOT.
_SERVED = "/data/local-files/?d="
# The probability is in the tasks, but not on the page, where it would lead the answer.
_PAGE = """\
<View>
  <Image name="image" value="$image" maxWidth="640px"/>
  <Header value="Mined caption"/>
  <Text name="caption" value="$caption"/>
  <Header value="Recorded with this picture"/>
  <Text name="recorded" value="$recorded"/>
  <Choices name="verdict" toName="image" choice="single" required="true" showInLine="true">
    <Choice value="yes" hotkey="y"/>
    <Choice value="no" hotkey="n"/>
    <Choice value="unsure" hotkey="u"/>
  </Choices>
</View>
"""


def write_label_studio(
    workspace: Workspace, edges: Stage, count: int, directory: Path, tally: Tally
) -> tuple[dict[str, int], list[str]]:
    """Write ``tasks.json`` (one task per edge, in the order to be asked), ``page.xml`` and ``images/``.

    Returns:
        The rows by file, and the notes.

    Raises:
        InputError: nothing was judged.
    """
    table, _ = edges_to_ask(edges, ["caption"], count)
    images = np.unique(table["image_id"].to_numpy())
    names = _write_pictures(workspace, images, directory, tally)
    recorded = _recorded(workspace, images)
    tasks: list[dict[str, Any]] = [
        {
            "data": {
                "image": f"{_SERVED}{names[image]}",
                "caption": caption,
                "recorded": "\n".join(recorded[image]),
                "image_id": image,
                "pair_id": pair,
                "match_probability": round(probability, 4),
            }
        }
        for image, pair, probability, caption in zip(*(column.to_pylist() for column in table.columns), strict=True)
        if image in names
    ]
    (directory / TASKS).write_text(json.dumps(tasks, ensure_ascii=False, indent=1), encoding="utf-8")
    (directory / PAGE).write_text(_PAGE, encoding="utf-8")
    return {TASKS: len(tasks)}, []


def _write_pictures(workspace: Workspace, images: np.ndarray, directory: Path, tally: Tally) -> dict[int, str]:
    """Write the pictures; their paths from ``directory``, by image_id, of those that decode."""
    (directory / IMAGES).mkdir()
    names = {}
    for shard in np.unique(workspace.shards_of(images)).tolist():
        mine = images[workspace.shards_of(images) == shard]
        workspace.tar(shard)
        for image, data in zip(mine.tolist(), workspace.pictures.read(mine), strict=True):
            if workspace.pictures.decoded(data) is None:
                tally.undecodable += 1
                continue
            names[image] = f"{IMAGES}/{image:08d}.{picture_ending(data)}"
            (directory / names[image]).write_bytes(data)
            tally.count(ImageRecord(image, data, [], []))
    return names


def _recorded(workspace: Workspace, images: np.ndarray) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    for shard in np.unique(workspace.shards_of(images)).tolist():
        pairs = workspace.read_pairs(["image_id", "caption"], shard=shard)
        pairs = pairs.filter(pc.is_in(pairs["image_id"], pa.array(images)))
        for image, caption in zip(pairs["image_id"].to_pylist(), pairs["caption"].to_pylist(), strict=True):
            found.setdefault(image, []).append(caption)
    return found
