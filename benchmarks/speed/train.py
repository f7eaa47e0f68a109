"""What MAFA costs in training when its judgements are looked up, and what the loader and the look-up cost.

    python benchmarks/speed/train.py                                   # ALBEF's proportions on two cores, some minutes
    python benchmarks/speed/train.py --model fnpipe-tiny --batch 64 --rounds 12 --no-blip  # a minute
    python benchmarks/speed/train.py --batch 128 --rounds 12 --device cuda --precision bf16

Steps of `grit`, of `mafa` with precomputed edges, and of MAFA with Con-D run inside the step are timed in turn on the
same random batches: forward, backward, AdamW. A ratio is the median over the rounds, of CPU seconds on a CPU, which
other jobs hardly disturb, and of wall clocks on a GPU. Every combination has a score, and about a tenth of the hardest
negatives is a positive (the share that was met is printed). Con-D has the model's own shape, and BLIP-base's at 384 px
(random weights, the ``blip`` extra). The last line is JSON.

Measured: see docs/performance/train.md.
"""

from __future__ import annotations

import argparse
import copy
import io
import json
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from fnpipe.mining.data.train_pairs import read_train_pairs
from fnpipe.mining.edges.labels import AMBIGUOUS, NEGATIVE, POSITIVE
from fnpipe.mining.edges.lookup import EdgeLookup
from fnpipe.pipeline.images.decode import decode_rgb
from fnpipe.pipeline.shard.stage import ShardConfig, shard
from fnpipe.pipeline.workspace.workspace import Workspace
from fnpipe.train.data.augment import make_augment
from fnpipe.train.data.batches import DecodingLoader, Loader
from fnpipe.train.data.pictures import Samples
from fnpipe.train.data.plans import RandomBatches
from fnpipe.train.loop.optim import parameter_groups
from fnpipe.train.model.build import build_model
from fnpipe.train.model.config import ModelConfig
from fnpipe.train.model.model import VLModel
from fnpipe.train.objectives.ecm import PLAIN, EcmConfig
from fnpipe.train.objectives.step import StepConfig, StepInput, TrainStep, mask_generator

POSITIVE_SHARE, AMBIGUOUS_SHARE = 0.10, 0.05
WORDS = tuple("a the red small dog street man two with on of in white sitting table near large green old bus".split())  # noqa: SIM905
# Image and text of every hardest negative -> p, in the step.
Judge = Callable[[StepInput, np.ndarray, np.ndarray], torch.Tensor]


class Clock:
    """Wall seconds of a GPU, CPU seconds of a CPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            return time.perf_counter()
        return time.process_time()


def make_batches(model: VLModel, size: int, n: int, device: torch.device) -> list[StepInput]:
    """Random pictures, captions of 8 to 14 words, and a label for every combination."""
    rng = np.random.default_rng(0)
    batches = []
    for _ in range(n):
        captions = [" ".join(rng.choice(WORDS, rng.integers(8, 15))) for _ in range(size)]
        pixels = torch.from_numpy(rng.integers(0, 256, (size, 3, model.image_size, model.image_size), np.uint8))
        kind = rng.random((size, size))
        judged = np.where(kind < POSITIVE_SHARE + AMBIGUOUS_SHARE, AMBIGUOUS, NEGATIVE)
        label = np.where(kind < POSITIVE_SHARE, POSITIVE, judged)
        ids, own = model.tokenizer(captions), torch.eye(size, dtype=torch.bool)
        batches.append(StepInput(*(t.to(device) for t in (pixels, ids, own, torch.from_numpy(label)))))
    return batches


class Steps:
    """Training steps of one model in one of the ways that are compared."""

    def __init__(
        self,
        model: VLModel,
        optimizer: torch.optim.Optimizer,
        ecm: EcmConfig,
        dtype: torch.dtype | None,
        judge: Judge | None = None,
    ) -> None:
        config = StepConfig(itm=True, mlm=True, ecm=ecm, mask_rate=0.5, consistency=0.0, dtype=dtype)
        self.step, self.optimizer = TrainStep(model, config), optimizer
        self.dtype, self.judge, self.positives, self.hardest = dtype, judge, 0, 0

    def run(self, batch: StepInput, number: int, scored: bool) -> None:
        label = batch.label if scored else None
        if self.judge is not None:
            label = self._online(batch)
        self.optimizer.zero_grad(set_to_none=True)
        total, _, decisions = self.step(
            StepInput(batch.pixels, batch.ids, batch.recorded, label), 0.0, mask_generator(0, 0, number)
        )
        total.backward()
        self.optimizer.step()
        self.positives += int(decisions.counts["positive"])
        self.hardest += int(decisions.counts["hardest"])

    @torch.no_grad()
    def _online(self, batch: StepInput) -> torch.Tensor:
        """Con-D's work on as many pairs as there are hardest negatives; the labels stay, so that all train alike."""
        assert self.judge is not None
        assert batch.label is not None
        order = np.random.default_rng(0).permutation(len(batch.ids))
        anchors = np.arange(len(order))
        with torch.autocast(batch.pixels.device.type, dtype=self.dtype, enabled=self.dtype is not None):
            self.judge(batch, np.concatenate([anchors, order]), np.concatenate([order, anchors]))
        return batch.label


def own_shape_judge(con_d: VLModel) -> Judge:
    """Con-D of the model's own shape: both towers and the fusion encoder."""

    def judge(batch: StepInput, images: np.ndarray, texts: np.ndarray) -> torch.Tensor:
        tokens, _ = con_d.encode_image(con_d.transform.normalise(batch.pixels))
        keys, text = con_d.image_keys(tokens), con_d.text_tokens(batch.ids)
        rows, columns = (torch.from_numpy(r).to(batch.ids.device) for r in (images, texts))
        fused = con_d.fuse(text[columns], con_d.text_mask(batch.ids)[columns], keys, rows, first_only=True)
        return con_d.itm_logits(fused).softmax(1)[:, 1]

    return judge


def blip_judge(device: torch.device) -> Judge:
    """BLIP-base at 384 px with random weights: what the paper runs in every step."""
    from transformers import BlipConfig, BlipForImageTextRetrieval

    config = BlipConfig()
    config.vision_config.image_size = 384
    blip = BlipForImageTextRetrieval(config).to(device).eval()

    def judge(batch: StepInput, images: np.ndarray, texts: np.ndarray) -> torch.Tensor:
        large = torch.nn.functional.interpolate(batch.pixels.float() / 255, (384, 384))
        tokens = blip.vision_model(pixel_values=large).last_hidden_state
        rows, columns = (torch.from_numpy(r).to(device) for r in (images, texts))
        out = blip.text_encoder(
            input_ids=batch.ids[columns] % 30000,
            encoder_hidden_states=tokens[rows],
            encoder_attention_mask=torch.ones(tokens[rows].shape[:-1], device=device),
        ).last_hidden_state
        return blip.itm_head(out[:, 0]).softmax(1)[:, 1]

    return judge


def time_steps(arguments: argparse.Namespace) -> dict[str, float]:
    """Seconds of a step in every way, as ratios."""
    device = torch.device(arguments.device)
    dtype = {"fp32": None, "bf16": torch.bfloat16}[arguments.precision]
    torch.manual_seed(0)
    model = build_model(ModelConfig(architecture=arguments.model)).to(device).train()
    con_d = copy.deepcopy(model).eval()
    # One optimiser for all ways: its states alone are twice the model.
    optimizer = torch.optim.AdamW(parameter_groups(model, 0.02), lr=1e-6, fused=True)
    mafa = Steps(model, optimizer, EcmConfig(), dtype)
    ways = {
        "grit": (Steps(model, optimizer, PLAIN, dtype), False),
        "mafa": (mafa, True),
        "online": (Steps(model, optimizer, EcmConfig(), dtype, own_shape_judge(con_d)), True),
    }
    if arguments.blip:
        ways["online_blip"] = (Steps(model, optimizer, EcmConfig(), dtype, blip_judge(device)), True)
    batches = make_batches(model, arguments.batch, arguments.rounds, device)
    # The first round pays for allocations and kernels.
    time_round(ways, batches[0], 0, Clock(device))
    mafa.positives = mafa.hardest = 0
    rounds = []
    for number, batch in enumerate(batches):
        rounds.append(time_round(ways, batch, number, Clock(device)))
        print("step, s: " + ", ".join(f"{name} {value:.3f}" for name, value in rounds[-1].items()), flush=True)
    share = mafa.positives / mafa.hardest
    print(f"share of hardest negatives mined positive: {share:.1%}")

    def ratio(way: str, to: str) -> float:
        return float(np.median([seconds[way] / seconds[to] for seconds in rounds]))

    found = {"mafa_vs_grit": ratio("mafa", "grit"), "positive_share": share}
    found["online_vs_precomputed"] = ratio("online", "mafa")
    if arguments.blip:
        found["online_blip_vs_precomputed"] = ratio("online_blip", "mafa")
    return found


def time_round(ways: dict[str, tuple[Steps, bool]], batch: StepInput, number: int, clock: Clock) -> dict[str, float]:
    """Seconds of one step in every way, beginning with another way in every round."""
    names = list(ways)
    seconds: dict[str, float] = {}
    for name in names[number % len(names) :] + names[: number % len(names)]:
        steps, scored = ways[name]
        start = clock.now()
        steps.run(batch, number, scored)
        seconds[name] = clock.now() - start
    return {name: seconds[name] for name in names}


def time_loader(images: int, rounds: int = 3) -> dict[str, float]:
    """Samples a second of one core: the loader on a shuffled plan, against WebDataset front to back, decoded alike."""
    import webdataset

    # Threads that wait for each other inside one small picture's resize take CPU seconds and do nothing.
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        workspace = _jpeg_workspace(Path(scratch), images)
        samples = Samples.of(workspace)
        augment = make_augment("open-clip", 224, False, lambda rgb: torch.empty(0))
        loader = Loader(
            samples, DecodingLoader(samples, 224, augment, 0), lambda texts: torch.zeros(len(texts), 1), None, None, 0
        )
        plan = RandomBatches(read_train_pairs(workspace), 64, 0).epoch(0)

        def ours() -> Iterator[int]:
            return (len(batch) for batch in loader.batches(plan, 0, range(len(plan))))

        def theirs() -> Iterator[int]:
            urls = [workspace.shard_url(s) for s in range(workspace.n_shards)]
            rng = np.random.default_rng(0)
            pipeline = webdataset.WebDataset(urls, shardshuffle=False, empty_check=False)
            return (augment(decode_rgb(sample["jpg"]), rng).ndim // 3 for sample in pipeline)

        rates: dict[str, list[float]] = {"ours": [], "webdataset": []}
        for _ in range(rounds):
            for name, source in (("ours", ours), ("webdataset", theirs)):
                start = time.process_time()
                rates[name].append(sum(source()) / (time.process_time() - start))
    median = {name: float(np.median(values)) for name, values in rates.items()}
    print(f"loader, samples per CPU second: {median['ours']:.0f}, webdataset {median['webdataset']:.0f}")
    return {"loader_vs_webdataset": median["ours"] / median["webdataset"]}


def _jpeg_workspace(root: Path, images: int) -> Workspace:
    rng = np.random.default_rng(0)
    (root / "source").mkdir()
    rows: list[dict[str, Any]] = []
    for i in range(images):
        # Smooth noise: about as many bytes as a photograph of this size.
        small = Image.fromarray(rng.integers(0, 256, (60, 80, 3), np.uint8))
        buffer = io.BytesIO()
        small.resize((640, 480), Image.Resampling.BICUBIC).save(buffer, "JPEG", quality=85)
        (root / "source" / f"{i}.jpg").write_bytes(buffer.getvalue())
        rows.append({"image": f"{i}.jpg", "caption": f"picture number {i}"})
    (root / "source" / "pairs.json").write_text(json.dumps(rows))
    shard([str(root / "source" / "pairs.json")], str(root / "ws"), ShardConfig())
    return Workspace.open(root / "ws")


def time_lookup(edges: int, batch: int = 128, rounds: int = 30) -> dict[str, float]:
    """Milliseconds (CPU) to look a batch's block up, and what the process holds for it."""
    rng = np.random.default_rng(0)
    n_images, n_pairs = 4_000_000, 5_000_000
    keys = np.cumsum(rng.integers(1, 2 * n_images * n_pairs // edges, edges))
    lookup = EdgeLookup(n_pairs, keys, np.zeros(edges, np.float32), np.zeros(edges, np.int8))
    held = (lookup.keys.nbytes + lookup.match_probability.nbytes + lookup.labels.nbytes) / 2**30
    del keys
    seconds, grown = [], 0.0
    for _ in range(rounds):
        images, pairs = rng.integers(0, n_images, batch), rng.integers(0, n_pairs, batch)
        start = time.process_time()
        lookup.find(images[:, None], pairs[None, :])
        seconds.append(time.process_time() - start)
        tracemalloc.start()
        lookup.find(images[:, None], pairs[None, :])
        grown = max(grown, tracemalloc.get_traced_memory()[1] / 2**30)
        tracemalloc.stop()
    milliseconds = 1000 * float(np.median(seconds))
    print(f"look-up of {batch} x {batch} in {edges:,}: {milliseconds:.2f} ms, arrays {held:.2f} GiB, {grown:.3f} more")
    return {"lookup_ms": milliseconds, "lookup_gib": held + grown}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="albef-base")
    parser.add_argument("--batch", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=4, help="steps in every way")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--images", type=int, default=256, help="pictures that the loader reads")
    parser.add_argument("--edges", type=int, default=100_000_000)
    parser.add_argument(
        "--blip", action=argparse.BooleanOptionalAction, default=True, help="Con-D of BLIP-base's shape"
    )
    arguments = parser.parse_args()
    found = {**time_lookup(arguments.edges), **time_loader(arguments.images)}
    torch.set_num_threads(arguments.threads)
    found |= time_steps(arguments)
    print(json.dumps({key: round(value, 4) for key, value in found.items()}))


if __name__ == "__main__":
    main()
