"""What FALCON costs beside plain training: its second forward pass, its policy, and the construction of its batches.

    python benchmarks/speed/falcon.py  # ALBEF's shape, reduced; a few minutes
    python benchmarks/speed/falcon.py --model albef-base --device cuda --precision bf16

Steps of `grit` and of `falcon` (per anchor, learning) are timed in turn on one model and the same random batches of 96:
forward, backward, AdamW, and for FALCON the loss once more under the same masks, the policy's update, and the cache of
embeddings. A whole search space of 5,664 pairs of width 256 is constructed by itself, in one thread; a step of FALCON
counts its share of that, as if nothing were constructed beside the training. On a CPU the model has all of ALBEF's
tokens (256 px in patches of 16, captions of 8 to 14 words), a third of its layers (4, 2 and 2) and an eighth of its
width: both sides share it. Times are CPU seconds on a CPU, wall seconds on a GPU. The last line is JSON:
``falcon_vs_grit`` is the ratio of steps, ``construction_share`` the construction of a search space over the training on
it.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import open_clip
import torch

from fnpipe.mining.data.train_pairs import train_pairs_of
from fnpipe.train.data.batches import Batch
from fnpipe.train.distributed import World
from fnpipe.train.falcon.batches import EmbeddingCache, EpochConstruction, FalconSource
from fnpipe.train.falcon.keys import resolve_falcon
from fnpipe.train.falcon.policy import PolicyChooser, Scheduler
from fnpipe.train.falcon.scheduler import Falcon, policy_config
from fnpipe.train.learners.keys import TrainConfig
from fnpipe.train.loop.optim import parameter_groups
from fnpipe.train.model.build import build_model
from fnpipe.train.model.config import ModelConfig
from fnpipe.train.objectives.ecm import PLAIN
from fnpipe.train.objectives.step import StepConfig, StepInput, TrainStep, mask_generator
from train import Clock, make_batches

BATCH, SEARCH_SPACE, WIDTH = 96, 5664, 256
REDUCED = "albef-reduced"


def register_reduced() -> None:
    """ALBEF's shape with a third of its layers and an eighth of its width, under open_clip's list."""
    layout = {
        "embed_dim": WIDTH,
        "custom_text": True,
        "vision_cfg": {"image_size": 256, "layers": 4, "width": 96, "head_width": 32, "patch_size": 16},
        "text_cfg": {
            "context_length": 77,
            "vocab_size": 49408,
            "width": 96,
            "heads": 3,
            "layers": 2,
            "no_causal_mask": True,
            "pool_type": "first",
        },
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{REDUCED}.json"
        path.write_text(json.dumps(layout))
        open_clip.add_model_config(path)


@dataclass
class Rows:
    """Stands for stored embeddings of one modality: similar pairs exist, as in real ones."""

    array: np.ndarray

    @classmethod
    def drawn(cls, centres: np.ndarray, rng: np.random.Generator) -> Rows:
        rows = centres + rng.normal(size=centres.shape)
        return cls((rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32))

    def take(self, ids: np.ndarray) -> np.ndarray:
        return self.array[ids]


@dataclass
class Stored:
    images: Rows
    texts: Rows


def make_source() -> FalconSource:
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(400, WIDTH))[rng.integers(0, 400, SEARCH_SPACE)]
    stored: Any = Stored(Rows.drawn(centres, rng), Rows.drawn(centres, rng))
    members = train_pairs_of(np.arange(SEARCH_SPACE), np.arange(SEARCH_SPACE))
    return FalconSource(members, stored, BATCH, SEARCH_SPACE, 0)


class PreparedLoader:
    """Hands out batches that were made before; loading costs both sides the same, and is left out."""

    workers = 0

    def __init__(self, inputs: list[StepInput]) -> None:
        self.inputs = inputs

    def pixels(self, epoch: int, image_ids: np.ndarray) -> tuple[torch.Tensor, np.ndarray]:
        return torch.empty(0), np.ones(len(image_ids), bool)

    def collate_rows(self, image_ids: np.ndarray, pair_ids: np.ndarray, *, number: int, **_: Any) -> Batch:
        made = self.inputs[number % len(self.inputs)]
        return Batch(0, number, image_ids, pair_ids, made.pixels, made.ids, made.recorded, None, None, 0)


class Steps:
    """Training steps of one model with and without FALCON."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.device = torch.device(arguments.device)
        torch.manual_seed(0)
        reduced = arguments.model == REDUCED
        shape = ModelConfig(architecture=arguments.model, fusion_layers=2 if reduced else None)
        self.model = build_model(shape).to(self.device).train()
        dtype = {"fp32": None, "bf16": torch.bfloat16}[arguments.precision]
        self.step = TrainStep(
            self.model, StepConfig(itm=True, mlm=True, ecm=PLAIN, mask_rate=0.5, consistency=0.0, dtype=dtype)
        )
        self.optimizer = torch.optim.AdamW(parameter_groups(self.model, 0.02), lr=1e-5, fused=True)
        config = TrainConfig(method="falcon", batch_size=BATCH, search_space=SEARCH_SPACE, ahead=0)
        self.config = replace(config, **resolve_falcon(config, BATCH, small=False))
        self.source = make_source()
        loader: Any = PreparedLoader(make_batches(self.model, BATCH, 3, torch.device("cpu")))
        group = World(0, 1, self.device)
        self.falcon = Falcon(self.config, self.source, loader, self.step, group, self.source.batches_per_epoch)

    def plain(self, batch: Batch) -> StepInput:
        """A step of `grit`."""
        inputs = replace(StepInput.of(batch, self.device), p=None)
        self.optimizer.zero_grad(set_to_none=True)
        total, self.losses, _ = self.step(inputs, 0.0, mask_generator(0, 0, batch.number))
        total.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 5.0)
        self.optimizer.step()
        return inputs

    def with_falcon(self, batch: Batch) -> None:
        inputs = self.plain(batch)
        self.falcon.after_forward(0, inputs, self.losses)
        self.falcon.after_step()
        self.falcon.commit()


def time_construction(source: FalconSource, config: TrainConfig, clock: Clock) -> float:
    """Seconds to construct a whole search space, its similarities included."""
    snapshot, policy = Scheduler(policy_config(config), 0).snapshot(), policy_config(config)
    seconds = []
    for repetition in range(3):
        start = clock.now()
        construction = EpochConstruction(source, EmbeddingCache(source, WIDTH), 0, np.zeros(SEARCH_SPACE, bool))
        for number in range(source.batches_per_epoch):
            rng = np.random.default_rng([repetition, number])
            construction.construct(number, PolicyChooser(snapshot, policy, rng))
        seconds.append(clock.now() - start)
    return float(np.median(seconds))


@contextmanager
def closing(batches: Iterator[Batch]) -> Iterator[Iterator[Batch]]:
    try:
        yield batches
    finally:
        batches.close()  # type: ignore[attr-defined]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=REDUCED)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    register_reduced()
    steps = Steps(arguments)
    clock = Clock(steps.device)
    seconds: dict[str, list[float]] = {"grit": [], "falcon": []}
    with closing(steps.falcon.batches(0, 0)) as batches:
        for number in range(arguments.steps + 1):
            batch = next(batches)
            for name, run in (("grit", steps.plain), ("falcon", steps.with_falcon)):
                start = clock.now()
                run(batch)
                # The first round pays for allocations and kernels.
                if number:
                    seconds[name].append(clock.now() - start)
    # Constructed by CPUs, whatever trains.
    construction = time_construction(steps.source, steps.config, Clock(torch.device("cpu")))
    rounds = steps.source.batches_per_epoch
    median = {name: float(np.median(values)) for name, values in seconds.items()}
    whole = median["falcon"] + construction / rounds
    spread = {name: f"{min(values):.2f} to {max(values):.2f}" for name, values in seconds.items()}
    print(f"step of grit {median['grit']:.3f} s ({spread['grit']}), of falcon {median['falcon']:.3f} s", end=" ")
    print(f"({spread['falcon']}); a search space of {SEARCH_SPACE:,} in {construction:.2f} s, {rounds} batches")
    found = {
        "falcon_vs_grit": whole / median["grit"],
        "construction_share": construction / (rounds * median["falcon"]),
        "construction_seconds": construction,
    }
    print(json.dumps({key: round(value, 4) for key, value in found.items()}))


if __name__ == "__main__":
    main()
