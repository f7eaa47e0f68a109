"""What a run reads, opened and checked before its first step: the plan, the edges, the tars, the truth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fnpipe.mining.data.identity import IDENTITY_BOUND, Identity
from fnpipe.mining.data.train_pairs import read_train_pairs, train_pairs_of
from fnpipe.mining.data.truth import Truth
from fnpipe.mining.edges.lookup import EdgeLookup
from fnpipe.mining.edges.reader import EdgesInfo, read_recorded
from fnpipe.mining.edges.thresholds import TAU_HIGH, TAU_LOW
from fnpipe.mining.plans.conflicts import KnownMatches
from fnpipe.mining.plans.plan import plan_epochs
from fnpipe.pipeline.embed.cut_captions import CUT_SCHEMA, cut_notes, find_cut
from fnpipe.pipeline.errors import InputError
from fnpipe.pipeline.files.digests import file_digest
from fnpipe.pipeline.workspace.embeddings import Embeddings
from fnpipe.pipeline.workspace.workspace import Stage, Workspace
from fnpipe.train.data.augment import make_augment
from fnpipe.train.data.batches import DecodingLoader, FittedLoader, Loader, Pixels
from fnpipe.train.data.pictures import FittedPictures, Samples
from fnpipe.train.data.plans import BatchSource, RandomBatches, Warmed, WithoutPairs, check_batch_size
from fnpipe.train.data.stream import MaterializedPictures
from fnpipe.train.falcon.batches import FalconSource
from fnpipe.train.falcon.keys import FALCON, choose_search_space
from fnpipe.train.keys import TINY
from fnpipe.train.learners.keys import Recipe, TrainConfig
from fnpipe.train.learners.turns import Turn, batches_in_turn, find_turns, served_epochs
from fnpipe.train.model.load import SHIPPED
from fnpipe.train.model.model import VLModel
from fnpipe.train.model.tokenizer import CaptionTokenizer

# More than any tokenizer puts around a caption.
_SPECIAL_IDS = 4
_CAPTIONS_AT_ONCE = 4096


@dataclass(frozen=True)
class Inputs:
    """Everything that a run reads beside its starting weights.

    Attributes:
        edges: None where the method takes none and none were asked for. identity: what counts as recorded beside the
            recorded pairs; None: nothing does.
        pair_ids: (n,) int64, the pairs of the train split. batches_per_epoch: of all processes together.
        epochs: that the plans serve; None: as many as are asked for. begins_hard: the first batches are a GRIT plan's.
        stream: None: the pictures are read from the workspace's tars.
        thresholds: tau_low and tau_high by which the edges are labelled in this run.
        digests: what was read, by name; a resumed run must find the same.
    """

    workspace: Workspace
    samples: Samples
    source: BatchSource | FalconSource
    image_ids: np.ndarray
    pair_ids: np.ndarray
    edges: EdgeLookup | None
    identity: Identity | None
    thresholds: tuple[float, float]
    truth: Truth | None
    batches_per_epoch: int
    epochs: int | None
    begins_hard: bool
    stream: MaterializedPictures | None
    digests: dict[str, str] = field(default_factory=dict)


def open_inputs(workspace: Workspace, config: TrainConfig, architecture: str) -> Inputs:
    """Open what a config names, or what it needs and does not name.

    Raises:
        InputError: one is missing, damaged, unfinished, made for other pairs, or there are several to choose from.
    """
    # All that the run needs of the pairs, in one pass over them.
    workspace.pairs.load("image_of", "train", "picture_codes", "caption_codes", "captions", "places")
    members, turns = read_train_pairs(workspace), find_turns(workspace, config)
    batch_size = config.batch_size or (64 if architecture == TINY else 128)
    source: BatchSource | FalconSource
    if config.captions != "one" and (turns or config.method == FALCON):
        raise InputError("captions is all, and is of random batches; plan with `fnpipe group --captions all` instead")
    if config.method == FALCON:
        source = open_falcon(workspace, config, batch_size)
        made_of = [source.embeddings.stage]
    else:
        source = open_batches(
            workspace, config, turns, RandomBatches(members, batch_size, config.seed, config.captions)
        )
        made_of = [turn.plan for turn in turns]
    check_batch_size(source.batch_size, config.batch_size, workspace)
    mined = find_edges(workspace, config) if config.method_losses.ecm or config.edges is not None else None
    edges, bound, thresholds = _labelled(mined, config)
    digests = _digests(workspace, config, [*made_of, *([mined] if mined else [])])
    truth = open_truth(workspace, config.truth, digests)
    samples = Samples.of(workspace)
    stream = open_stream(config, turns)
    if stream is None:
        samples.check(workspace)
    return Inputs(
        workspace=workspace,
        samples=samples,
        source=source,
        image_ids=members.images,
        pair_ids=members.pair_ids,
        edges=edges,
        identity=identity_beyond_records(workspace, bound),
        thresholds=thresholds,
        truth=truth,
        batches_per_epoch=source.batches_per_epoch if isinstance(source, FalconSource) else len(source.epoch(0)),
        epochs=served_epochs(turns),
        begins_hard=bool(turns) and turns[0].grouped and not config.warm,
        stream=stream,
        digests=digests,
    )


def _digests(workspace: Workspace, config: TrainConfig, stages: list[Stage]) -> dict[str, str]:
    """What the run is made from; edges that say no more than which recorded pairs are doubted are an input as well."""
    if config.min_recorded_probability > 0:
        stages = [*stages, find_edges(workspace, config)]
    return {"pairs": workspace.digest, **{stage.name: stage.digest for stage in stages}}


def open_batches(workspace: Workspace, config: TrainConfig, turns: Sequence[Turn], drawn: RandomBatches) -> BatchSource:
    """The batches of plans, or else those ``drawn``, without the doubted pairs; random epochs before them if asked.

    Raises:
        InputError: the plan has another batch size than was asked for, or ``warm`` goes before no GRIT plan.
    """
    source: BatchSource = batches_in_turn(turns, config.batch_size) if turns else drawn
    if config.min_recorded_probability > 0:
        source = WithoutPairs(source, doubted_pairs(find_edges(workspace, config), config.min_recorded_probability))
    if config.warm:
        if not source.grouped or config.materialized is not None:
            raise InputError(
                f"warm is {config.warm}, and goes before the batches of a GRIT plan that is not materialized"
            )
        source = Warmed(source, config.warm, config.seed)
    return source


def _labelled(edges: Stage | None, config: TrainConfig) -> tuple[EdgeLookup | None, int, tuple[float, float]]:
    """Edges as this run labels them, the bound of their identity rule, and the thresholds in force."""
    if edges is None:
        return None, IDENTITY_BOUND, (TAU_LOW, TAU_HIGH)
    info = EdgesInfo.read(edges)
    others = info.other_thresholds(config.tau_low, config.tau_high)
    return EdgeLookup.read(edges, others), info.identity_bound, others or (info.tau_low, info.tau_high)


def make_loader(config: Recipe, inputs: Inputs, model: VLModel) -> Loader:
    """What makes the batches of a recipe for a model."""
    return Loader(
        samples=inputs.samples,
        pixels=_pixels(config, inputs, model),
        tokenize=model.tokenizer,
        edges=inputs.edges,
        identity=inputs.identity,
        workers=config.workers,
        stream=inputs.stream,
    )


def _pixels(config: Recipe, inputs: Inputs, model: VLModel) -> Pixels:
    """Pictures at the input size, kept in memory where they fit, for mild augmentation; else from their full size."""
    transform, flip = model.transform, config.flip
    if config.augment in ("tiny", "none"):
        budget = 0 if config.workers or inputs.stream else config.cache_mib << 20
        pictures = FittedPictures(inputs.samples, transform, model.image_size, inputs.image_ids, budget)
        return FittedLoader(pictures, config.seed, flip, plain=config.augment == "none")
    augment = make_augment(config.augment, model.image_size, flip, transform)
    return DecodingLoader(inputs.samples, model.image_size, augment, config.seed)


def cut_captions(samples: Samples, pair_ids: np.ndarray, tokenizer: CaptionTokenizer) -> list[str]:
    """A note on the captions that the tokenizer cuts, out of those of (n,) ``pair_ids``; none where it cuts none."""
    captions = samples.captions.take(pa.array(pair_ids))
    # An id stands for a byte at least, in ASCII: the short ones, which are nearly all, need not be looked at.
    short = pc.and_(
        pc.string_is_ascii(captions), pc.less(pc.binary_length(captions), tokenizer.context_length - _SPECIAL_IDS)
    )
    long, found = captions.filter(pc.invert(short)), []
    for first in range(0, len(long), _CAPTIONS_AT_ONCE):
        texts = long.slice(first, _CAPTIONS_AT_ONCE).to_pylist()
        found.append(find_cut(tokenizer, texts, tokenizer(texts)).numpy())
    rows = np.concatenate([np.empty((0, 2), np.int64), *found])
    return cut_notes(pa.table([rows[:, 0], rows[:, 1]], CUT_SCHEMA), len(pair_ids))


def identity_beyond_records(workspace: Workspace, bound: int) -> Identity | None:
    """The identity rule, which holds for the targets of every method: a copy is no negative. None: it adds nothing."""
    identity = Identity.of(workspace, bound) if bound else None
    return identity if identity is not None and identity.repeats else None


def open_falcon(workspace: Workspace, config: TrainConfig, batch_size: int) -> FalconSource:
    """What falcon constructs its batches from: the train pairs that have an embedding, without those that are doubted.

    Raises:
        InputError: there are no embeddings, or several to choose from; the search space is not cut into whole batches.
    """
    if config.embeddings is None and not workspace.names("embeddings"):
        raise InputError(
            f"{workspace.root}: no embeddings, which {FALCON}'s first epoch looks through; "
            f"make some with `fnpipe embed {workspace.root}`"
        )
    embeddings = Embeddings.open(workspace, config.embeddings)
    members = read_train_pairs(workspace, embeddings)
    if config.min_recorded_probability > 0:
        doubted = doubted_pairs(find_edges(workspace, config), config.min_recorded_probability)[members.pair_ids]
        members = train_pairs_of(members.pair_ids[~doubted], members.image_ids[~doubted])
    known = None
    if config.skip_mined:
        edges = find_edges(workspace, config)
        known = KnownMatches.of(edges, EdgesInfo.read(edges).tau_low if config.tau_low is None else config.tau_low)
    return FalconSource(members, embeddings, batch_size, choose_search_space(config, batch_size), config.seed, known)


def open_stream(config: TrainConfig, turns: Sequence[Turn]) -> MaterializedPictures | None:
    """The materialised plan that is named; None: the pictures come from the workspace's tars."""
    if config.materialized is None:
        return None
    if not turns:
        raise InputError(f"materialized is {config.materialized}, and the run has no plan; name it with --groups")
    if config.min_recorded_probability > 0:
        raise InputError("materialized shards hold whole batches; leave min_recorded_probability out, or materialized")
    plan = turns[0].plan
    return MaterializedPictures(config.materialized, plan, plan_epochs(plan))


def find_edges(workspace: Workspace, config: TrainConfig) -> Stage:
    """The edges that are named, or the only ones there are."""
    if config.edges is None and not workspace.names("edges"):
        needs = config.method if config.method_losses.ecm else "min_recorded_probability"
        raise InputError(
            f"{workspace.root}: no edges, which {needs} needs; "
            f"make some with `fnpipe mine-connections {workspace.root}`"
        )
    return workspace.resolve("edges", config.edges, "--edges")


def doubted_pairs(edges: Stage, minimum: float) -> np.ndarray:
    """(n_pairs,) bool: recorded pairs whose p lies below ``minimum``; a pair without a p is not doubted.

    Raises:
        InputError: the recorded pairs were not scored.
    """
    table = read_recorded(edges)
    doubted = np.zeros(edges.workspace.n_pairs, bool)
    # NaN compares as False.
    doubted[table["pair_id"].to_numpy()] = table["match_probability"].to_numpy() < np.float32(minimum)
    return doubted


def open_truth(workspace: Workspace, path: str | None, digests: dict[str, str]) -> Truth | None:
    """The truth file that is named; its digest joins ``digests``."""
    if path is None:
        return None
    truth = Truth.read(path, workspace)
    digests["truth"] = file_digest(Path(path))
    return truth


def init_digest(init: str | None, weights: Path | None) -> dict[str, str]:
    """The digest of the starting weights, where they are a file; a shipped or open_clip's own stand for themselves."""
    if init is None or init in SHIPPED or weights is None or not weights.is_file():
        return {}
    return {"init": file_digest(weights)}
