"""What 4 and 400 million pairs would take, from what was measured on fewer.

    python benchmarks/scale/outlook.py REHEARSAL.json [--pairs 4000000 400000000]

REHEARSAL.json holds the last line of `rehearsal.py`. Nothing is measured here. A figure stands as it is where it was
measured at that size; `~` marks one that was carried on from another size, in proportion, and `?` one that rests on an
assumption about machines that were not there. `(!)` is more memory than a machine of 256 GB has. The output is
Markdown; its last line is JSON.

Assumed of the data: one caption a picture, pictures of 37 kB, embeddings of width 512, a graph of k = 32, batches of
128, five planned epochs, 8 candidates an anchor and direction.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rehearsal import Rehearsal, judgements_an_image, table

PAIRS = (4_000_000, 400_000_000)
PICTURE_BYTES, WIDTH, K, EPOCHS, CANDIDATES = 37_000, 512, 32, 5, 8
HOUR, GB = 3600.0, 1e9

# Measured on two cores, each by the script named, November 2026.
SHARD_PER_SECOND = 1_856  # shard.py, pictures of 640 x 480
SHARD_BYTES_A_ROW = 1.11 * 2**30 / 2_000_000  # shard.py, two million rows of one JSON list
IMAGES_PER_SECOND, CAPTIONS_PER_SECOND = 31.3, 193.7  # embed.py, ViT-B-32 in bfloat16
EMBED_GIB = 2.1  # embed.py
JUDGEMENTS_PER_SECOND = 9.0  # mine.py, ALBEF's proportions at 256 px, 6 combinations an image
GRAPH_PAIRS = 4_000_000  # graph.py at that size: half of 1,415 CPU seconds
GRAPH_HOURS, GRAPH_GIB = 1_415 / 2 / HOUR, 7.13
PLAN_PAIRS = 4_000_000  # group.py at that size and M = 1,920, on a machine that had much other work
PLAN_HOURS = 324 / HOUR
PLAN_ALL_PAIRS = 4_000_000  # group.py at that size and M = all, given the graph: half of 84 CPU seconds
PLAN_ALL_HOURS = 42 / HOUR
LOOKUP_BYTES_AN_EDGE = 13.0  # train.py
PLAN_BYTES_A_PAIR = 200.0  # members (speed/tables.py: 96), and a dozen columns of 8 bytes
PEAK_BYTES_A_PAIR = 600.0  # speed/tables.py: while the identity rule is read, which mining and training do

# Assumed of one GPU: 312 Tflop/s in bfloat16 (an A100's), of which models reach between these shares.
GPU_FLOPS, SHARES = 312e12, (0.1, 0.4)
LARGE_MACHINE = 256 * GB
EMBED_FLOPS_A_PAIR = 9.3e9 + 2.3e9  # embed.py's 292 Gflop/s at 31.3 pictures a second; a caption of 26 tokens
JUDGE_FLOPS = 48e9 / 10 + 2.6e9  # the picture's part at 10 judgements an image, caption and fusion of 14 tokens
TRAIN_FLOPS_A_PAIR = 3 * (48e9 + 1.2e9 + 4 * 1.4e9)  # forward and backward; one positive, two negatives, masked tokens


@dataclass(frozen=True)
class Row:
    """What one stage takes at one size.

    Attributes:
        hours: of two cores, None where it was not measured at any size. gpu_hours: from, to; None: nothing to gain.
        disk, memory: bytes, beside half a gigabyte of program.
        at, memory_at: the number of pairs that hours and memory were measured on; None for what was not measured whole.
    """

    stage: str
    hours: float | None
    at: int | None
    disk: float
    memory: float
    gpu_hours: tuple[float, float] | None = None
    memory_at: int | None = None


def outlook(pairs: int, rehearsals: list[Rehearsal]) -> list[Row]:
    """The stages of the chain at ``pairs`` pairs."""
    largest = rehearsals[-1]
    per_image = judgements_an_image(largest.stages)
    # Batches of other epochs hold other pairs: nearly every judgement of an epoch is a new one.
    judged = pairs * per_image * EPOCHS
    edge_bytes = largest.stages["mine-connections"]["bytes"] / _edges(largest.stages)
    plan_bytes = largest.stages["group, M = 1,920"]["bytes"] / _planned(largest.stages)
    return [
        Row("shard", pairs / SHARD_PER_SECOND / HOUR, 10_000, pairs * PICTURE_BYTES, pairs * SHARD_BYTES_A_ROW),
        Row(
            "embed, ViT-B-32",
            pairs * (1 / IMAGES_PER_SECOND + 1 / CAPTIONS_PER_SECOND) / HOUR,
            2_000,
            pairs * 2 * 2 * WIDTH,
            EMBED_GIB * 2**30,
            gpu(pairs * EMBED_FLOPS_A_PAIR),
        ),
        Row(
            "build-graph",
            GRAPH_HOURS if pairs <= GRAPH_PAIRS else None,
            GRAPH_PAIRS,
            pairs * 2 * K * 10,
            GRAPH_GIB * 2**30 * pairs / GRAPH_PAIRS,
            gpu(2 * 2.0 * pairs * pairs * WIDTH),
            GRAPH_PAIRS,
        ),
        Row(
            f"group, M = 1,920, {EPOCHS} epochs",
            PLAN_HOURS * EPOCHS * pairs / PLAN_PAIRS,
            PLAN_PAIRS,
            pairs * EPOCHS * plan_bytes,
            pairs * PLAN_BYTES_A_PAIR,
        ),
        Row(
            f"group, M = all, {EPOCHS} epochs",
            PLAN_ALL_HOURS * EPOCHS * pairs / PLAN_ALL_PAIRS,
            PLAN_ALL_PAIRS,
            pairs * EPOCHS * plan_bytes,
            # Sketches of both modalities, lists of both directions, old and new, and the walk's own arrays.
            pairs * (2 * (WIDTH + 4) + 12 * K + 60),
        ),
        Row(
            "mine-connections, ViT-B/16 Con-D",
            judged / JUDGEMENTS_PER_SECOND / HOUR,
            24,
            judged * edge_bytes + pairs * CANDIDATES * 2 * EPOCHS * 12,
            pairs * PEAK_BYTES_A_PAIR,
            gpu(judged * JUDGE_FLOPS),
        ),
        Row(
            "train, ALBEF-base, one epoch",
            None,
            None,
            0.0,
            judged * LOOKUP_BYTES_AN_EDGE + pairs * PEAK_BYTES_A_PAIR,
            gpu(pairs * TRAIN_FLOPS_A_PAIR),
        ),
    ]


def gpu(flops: float) -> tuple[float, float]:
    """Hours of one GPU, from the best to the worst share of its peak."""
    return flops / GPU_FLOPS / max(SHARES) / HOUR, flops / GPU_FLOPS / min(SHARES) / HOUR


def _edges(stages: Mapping[str, Any]) -> int:
    return int(sum(stages["mine-connections"]["facts"]["labels"].values()))


def _planned(stages: Mapping[str, Any]) -> int:
    return int(stages["group, M = 1,920"]["facts"]["planned"])


def render(pairs: int, rows: Iterable[Row], judged: float) -> str:
    """One size as a Markdown table."""
    cells = [
        ["stage", "hours of two cores", "hours of one GPU", "on disk", "in memory"],
        *(
            [
                row.stage,
                "-" if row.hours is None else ("" if row.at == pairs else "~") + hours(row.hours),
                "-" if row.gpu_hours is None else f"{hours(row.gpu_hours[0])} to {hours(row.gpu_hours[1])} ?",
                f"~{size(row.disk)}" if row.disk else "-",
                ("" if row.memory_at == pairs else "~")
                + size(row.memory)
                + (" (!)" if row.memory > LARGE_MACHINE else ""),
            ]
            for row in rows
        ),
    ]
    return f"### {pairs:,} pairs, ~{judged:,.0f} judgements\n\n{table(cells)}"


def hours(value: float) -> str:
    """Hours in the unit that reads best."""
    if value < 1:
        return f"{value * 60:.1f} min"
    return f"{value:.1f} h" if value < 48 else f"{value / 24:,.0f} days"


def size(value: float) -> str:
    """Bytes in the unit that reads best."""
    return f"{value / GB:,.1f} GB" if value < 1000 * GB else f"{value / GB / 1000:,.1f} TB"


def read_rehearsals(path: Path) -> list[Rehearsal]:
    """The rehearsals of the last line of a file."""
    return [Rehearsal(**one) for one in json.loads(path.read_text().splitlines()[-1])["rehearsals"]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rehearsal", type=Path)
    parser.add_argument("--pairs", type=int, nargs="+", default=PAIRS)
    chosen = parser.parse_args()
    rehearsals = read_rehearsals(chosen.rehearsal)
    per_image = judgements_an_image(rehearsals[-1].stages)
    found = {pairs: outlook(pairs, rehearsals) for pairs in chosen.pairs}
    for pairs, rows in found.items():
        print(render(pairs, rows, pairs * per_image * EPOCHS) + "\n")
    print(json.dumps({pairs: [asdict(row) for row in rows] for pairs, rows in found.items()}))


if __name__ == "__main__":
    main()
