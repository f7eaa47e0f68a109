"""Training on frozen embeddings: batches of stored vectors, one small network, a run like any other.

No picture is opened, so that a run takes a minute. The batches come from a plan or are drawn at random, as for models
that read pictures, and every draw derives from (seed, epoch, batch): a run that was interrupted ends with the bytes of
one that was not.
"""

from __future__ import annotations

import dataclasses
import math
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fnpipe.mining.data.identity import IDENTITY_BOUND, Identity
from fnpipe.mining.data.train_pairs import read_train_pairs
from fnpipe.mining.data.truth import Truth
from fnpipe.mining.edges.labels import POSITIVE
from fnpipe.mining.edges.lookup import EdgeLookup
from fnpipe.mining.edges.reader import EdgesInfo
from fnpipe.pipeline.errors import InputError
from fnpipe.pipeline.files import atomic
from fnpipe.pipeline.files.digests import file_digest
from fnpipe.pipeline.machine.device import pick_device
from fnpipe.pipeline.machine.progress import progress
from fnpipe.pipeline.workspace.embeddings import Embeddings
from fnpipe.pipeline.workspace.record import FORMAT_VERSION
from fnpipe.pipeline.workspace.schemas import TEST
from fnpipe.pipeline.workspace.workspace import Workspace, reading
from fnpipe.train.data.plans import (
    BatchSource,
    EpochPlan,
    RandomBatches,
    WithoutPairs,
    check_batch_size,
    planned_batches,
)
from fnpipe.train.evaluation.on_embeddings import evaluate_frozen
from fnpipe.train.evaluation.queries import Queries, read_queries
from fnpipe.train.learners.embedding_keys import FROZEN_METHODS, FrozenConfig, VacsrConfig, resolve_frozen
from fnpipe.train.learners.inputs import identity_beyond_records
from fnpipe.train.loop.session import (
    AfterStep,
    Report,
    asked_values,
    deterministic,
    earlier_record,
    require_inputs,
    stop_signals,
)
from fnpipe.train.model.adapter import AdapterNet
from fnpipe.train.model.frozen_files import FrozenModel, describe_source, save_frozen
from fnpipe.train.model.vacsr import SeededNoise
from fnpipe.train.objectives.adapter import adapter_loss
from fnpipe.train.objectives.vacsr import vacsr_loss
from fnpipe.train.runs.directory import CHECKPOINTS, CONFIG, METRICS, checkpoint_digests, run_directory
from fnpipe.train.runs.log import Log, epoch_line, read_metrics
from fnpipe.train.runs.plots import plot_losses
from fnpipe.train.runs.state import STATE, Position, restore, truncate, write_state

DEFAULT_BATCH_SIZE = 64
# Keeps the draws of a run apart from those of its batches.
_NOISE, _START = 0x5A, 0x57


@dataclass(frozen=True)
class FrozenInputs:
    """What a run reads.

    Attributes:
        image_of: (n_pairs,) int64, the image of every pair.
        edges: None where none were asked for. identity: as in `fnpipe.train.learners.inputs.Inputs`.
        digests: what was read, by name; a resumed run must find the same.
    """

    workspace: Workspace
    embeddings: Embeddings
    source: BatchSource
    image_of: np.ndarray
    edges: EdgeLookup | None
    identity: Identity | None
    truth: Truth | None
    digests: Mapping[str, str]

    def positive(self, image_ids: np.ndarray, pair_ids: np.ndarray) -> np.ndarray:
        """(B, B) bool, image row, text column: what is recorded, identical, or, with edges, mined."""
        rows, columns = image_ids[:, None], pair_ids[None, :]
        positive: np.ndarray = self.image_of[columns] == rows
        if self.identity is not None:
            positive |= self.identity.matches(rows, columns)
        if self.edges is not None:
            positive |= self.edges.find(rows, columns)[1] == POSITIVE
        return positive


def open_frozen_inputs(workspace: Workspace, config: FrozenConfig) -> FrozenInputs:
    """Open what a config names.

    Raises:
        InputError: one is missing, unfinished or stale, or there are several to choose from.
    """
    embeddings = Embeddings.open(workspace, config.embeddings)
    digests = {"pairs": workspace.digest, embeddings.stage.name: embeddings.stage.digest}
    source: BatchSource
    if config.groups is not None:
        plan = workspace.resolve("groups", config.groups, "--groups")
        source = planned_batches(plan, config.batch_size)
        digests[plan.name] = plan.digest
    else:
        members = read_train_pairs(workspace, embeddings)
        source = RandomBatches(members, config.batch_size or DEFAULT_BATCH_SIZE, config.seed)
    check_batch_size(source.batch_size, config.batch_size, workspace)
    image_of = workspace.pairs.image_of
    usable = embeddings.usable(image_of, np.arange(workspace.n_pairs))
    if not usable.all():
        # A plan may have been made from other embeddings, or from none.
        source = WithoutPairs(source, ~usable)
    edges, bound, truth = None, IDENTITY_BOUND, None
    if config.edges is not None:
        stage = workspace.resolve("edges", config.edges, "--edges")
        digests[stage.name] = stage.digest
        info = EdgesInfo.read(stage)
        # Of the labels only the positive ones count here.
        low = info.tau_low if config.tau_high is None else min(info.tau_low, config.tau_high)
        edges = EdgeLookup.read(stage, None if config.tau_high is None else (low, config.tau_high))
        bound = info.identity_bound
    elif config.tau_high is not None:
        raise InputError(f"tau_high is {config.tau_high}, and there are no edges; name some with --edges")
    if config.truth is not None:
        truth = Truth.read(config.truth, workspace)
        digests["truth"] = file_digest(Path(config.truth))
    identity = identity_beyond_records(workspace, bound)
    return FrozenInputs(workspace, embeddings, source, image_of, edges, identity, truth, digests)


def train_frozen(
    workspace: Workspace,
    values: Mapping[str, Any],
    *,
    run: str,
    resume: bool = False,
    overwrite: bool = False,
    report: Report = lambda line: None,
    after_step: AfterStep = lambda step: None,
) -> dict[str, Any]:
    """Train on frozen embeddings, and leave ``runs/<run>/``; arguments, summary and errors as `loop.train`'s.

    Args:
        values: of one of `FROZEN_METHODS`, checked.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise InputError("training on frozen embeddings takes one process; leave torchrun out")
    directory = run_directory(workspace, run)
    with workspace.stage(f"runs/{run}").alone():
        before = None if overwrite else earlier_record(workspace.stage(f"runs/{run}"))
        asked = asked_values(directory, before, values, resume)
        if before is not None and before.get("complete"):
            result: dict[str, Any] = before["result"]
            return result
        config = FROZEN_METHODS[asked["method"]](**asked)
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        with deterministic(pick_device(config.device)):
            training = _prepare(workspace, config, asked, before, directory, overwrite)
            training.report, training.after_step = report, after_step
            try:
                held = reading(workspace, training.inputs.digests, "fnpipe train")
                with held, stop_signals(training.ask_to_stop):
                    return training.run(run)
            finally:
                training.log.close()


def _prepare(
    workspace: Workspace,
    config: FrozenConfig,
    asked: Mapping[str, Any],
    before: Mapping[str, Any] | None,
    directory: Path,
    overwrite: bool,
) -> FrozenTraining:
    """Open everything, choose what was left open, and write ``config.json``; nothing is trained yet."""
    inputs = open_frozen_inputs(workspace, config)
    device = pick_device(config.device)
    batches = len(inputs.source.epoch(0))
    if not batches:
        raise InputError(f"{workspace.root}: no batch to train on; every pair of it has no embedding")
    if before is not None:
        # What a run was begun with stays; the rule by which it was chosen may be another one today.
        config = dataclasses.replace(config, evaluate_on=before["config"]["evaluate_on"])
    config = resolve_frozen(
        config,
        embeddings=inputs.embeddings.name,
        width=inputs.embeddings.width,
        batches_per_epoch=batches,
        batch_size=inputs.source.batch_size,
        splits=list(workspace.splits()),
        device=device.type,
    )
    digests = dict(inputs.digests)
    require_inputs(directory, before, digests)
    queries = None
    if config.evaluate_on is not None:
        queries = read_queries(workspace, config.evaluate_on, config.evaluate_images, config.seed)
    record = {
        "format": FORMAT_VERSION,
        "complete": False,
        "config": dataclasses.asdict(config),
        "asked": dict(asked),
        "inputs": digests,
        "data": {"batches_per_epoch": batches, "processes": 1, "grouped": inputs.source.grouped},
        "source": describe_source(inputs.embeddings),
        "torch": torch.__version__,
    }
    # Everything has been checked: only now may what is there be touched.
    workspace.stage(f"runs/{directory.name}").start(record, overwrite=overwrite)
    return FrozenTraining(config, inputs, device, directory, record, queries)


class FrozenTraining:
    """A run in work."""

    report: Report
    after_step: AfterStep

    def __init__(
        self,
        config: FrozenConfig,
        inputs: FrozenInputs,
        device: torch.device,
        directory: Path,
        record: dict[str, Any],
        queries: Queries | None,
    ) -> None:
        self.config, self.inputs, self.device = config, inputs, device
        self.directory, self.record, self.queries = directory, record, queries
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(_seed(config.seed, _START))
            self.net = config.make_net(inputs.embeddings.width).to(device)
        self.optimizer = torch.optim.AdamW(
            self.net.parameters(), config.lr, weight_decay=config.weight_decay, fused=True
        )
        self.position = self._load()
        truncate(directory / METRICS, self.position.log_bytes)
        self.log = Log(directory, config.tensorboard, self.position.step)
        self.total = record["data"]["batches_per_epoch"] * int(config.epochs or 0)
        self.stopping = False

    def ask_to_stop(self) -> None:
        """Stop after the step in work."""
        self.stopping = True

    def run(self, name: str) -> dict[str, Any]:
        """All epochs that are left; the summary."""
        start = time.monotonic()
        with progress(f"training {name}", self.total - self.position.step, "steps") as advance:
            while self.position.epoch < int(self.config.epochs or 0):
                plan = self.inputs.source.epoch(self.position.epoch)
                for number in range(self.position.batches, len(plan)):
                    self._step(plan, number)
                    advance(1)
                    self.after_step(self.position.step)
                    self._stop_or_save()
                self._end_epoch()
        return self._finish(name, time.monotonic() - start)

    def _step(self, plan: EpochPlan, number: int) -> None:
        start = time.monotonic()
        image_ids, pair_ids = plan.batch(number)
        images, texts = self._rows(image_ids, pair_ids)
        positive = self.inputs.positive(image_ids, pair_ids)
        dropped = self.position.step >= self.config.drop_after * self.total
        rate = self.config.lr * (self.config.lr_drop if dropped else 1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.zero_grad(set_to_none=True)
        loss, parts = self._loss(images, texts, torch.from_numpy(positive).to(self.device), number)
        torch.autograd.backward(loss)
        values = {"loss": float(loss.detach()), **{name: float(part) for name, part in parts.items()}}
        if not math.isfinite(values["loss"]):
            self._save()
            raise InputError(
                f"{self.directory}: the loss is {values['loss']} in epoch {self.position.epoch}, batch {number}; the "
                "state before it is saved: train with a lower lr"
            )
        self.optimizer.step()
        self.position.batches += 1
        self.position.step += 1
        self.position.seen += len(image_ids)
        mined = {} if self.inputs.edges is None else {"positives": int(positive.sum()) - len(image_ids)}
        timing = {"images_per_s": len(image_ids) / (time.monotonic() - start)}
        line = {"epoch": self.position.epoch, "batch": number, **values, **mined, "lr": rate, **timing}
        self.log.write("step", self.position.step, line)

    def _rows(self, image_ids: np.ndarray, pair_ids: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        embeddings = self.inputs.embeddings
        rows = embeddings.images.take(image_ids), embeddings.texts.take(pair_ids)
        images, texts = (torch.from_numpy(part).to(self.device) for part in rows)
        return images, texts

    def _loss(
        self, images: torch.Tensor, texts: torch.Tensor, positive: torch.Tensor, number: int
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        config, net = self.config, self.net
        if isinstance(net, AdapterNet):
            loss = adapter_loss(net, images, texts, positive, config.loss)  # type: ignore[attr-defined]
            return loss, {"temp": 1 / net.scale().detach()}
        assert isinstance(config, VacsrConfig)
        noise = SeededNoise((config.seed, self.position.epoch, number, _NOISE), net, self.device, config.noise)
        return vacsr_loss(net, images, texts, positive, noise, config.loss_config, tile=config.tile)

    def _stop_or_save(self) -> None:
        """Stop where a signal asked for it; else save every ``checkpoint_steps``.

        Raises:
            KeyboardInterrupt: the run stops; its state is saved.
        """
        if self.stopping:
            self._save()
            raise KeyboardInterrupt
        if self.position.step % self.config.checkpoint_steps == 0:
            self._save()

    def _end_epoch(self) -> None:
        """Evaluate where it is time to, keep the best weights, save, and say how it goes."""
        config, epoch = self.config, self.position.epoch
        self.position.epoch, self.position.batches = epoch + 1, 0
        last = self.position.epoch == config.epochs
        due = last or (config.evaluate_every and self.position.epoch % config.evaluate_every == 0)
        figures = self._evaluate(epoch) if self.queries is not None and due else {}
        self.log.length()
        self.report(epoch_line(self.directory, epoch, config.epochs, config.losses, figures))
        self._save()

    def _evaluate(self, epoch: int) -> dict[str, float]:
        assert self.queries is not None
        found = evaluate_frozen(self.net.eval(), self.inputs.embeddings, self.queries, self.inputs.truth)
        self.net.train()
        flat = {f"{name}_{key}": value for name in ("dual", "frozen") for key, value in found[name].items()}
        self.log.write("evaluation", self.position.step, {"epoch": epoch, **flat})
        figures: dict[str, float] = found["dual"]
        score = figures.get("map_at_r", figures["rsum"])
        # Weights are never chosen by this split: what is reported on it would be too good.
        if self.queries.on != TEST and (self.position.best is None or score > self.position.best):
            self.position.best = score
            self._save_weights("best")
        return figures

    def _finish(self, name: str, seconds: float) -> dict[str, Any]:
        """Mark the run as complete; its summary."""
        self.log.length()
        steps, evaluations = read_metrics(self.directory, "step"), read_metrics(self.directory, "evaluation")
        result: dict[str, Any] = {
            "run": name,
            "method": self.config.method,
            "model": self.inputs.embeddings.stage.name,
            "epochs": self.config.epochs,
            "steps": self.position.step,
            "images_seen": self.position.seen,
            "seconds": round(seconds, 1),
            "losses": {key: steps[-1][key] for key in self.config.losses},
            "evaluation": {k: v for k, v in evaluations[-1].items() if k != "kind"} if evaluations else None,
        }
        plot_losses(self.directory, list(self.config.losses))
        done = {"complete": True, "outputs": checkpoint_digests(self.directory), "result": result}
        atomic.write_json(self.directory / CONFIG, {**self.record, **done})
        return result

    def _save(self) -> None:
        """Write ``last.state``, from which the run goes on, and ``last.safetensors``, for use."""
        self.position.log_bytes = self.log.length()
        state = {
            "position": dataclasses.asdict(self.position),
            "net": self.net.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }
        # The state last, as in `checkpoints.save_state`.
        self._save_weights("last")
        write_state(self.directory / CHECKPOINTS / STATE, state)

    def _save_weights(self, name: str) -> None:
        model = FrozenModel(self.config.method, self.net, self.record["source"])
        save_frozen(self.directory / CHECKPOINTS / f"{name}.safetensors", model)

    def _load(self) -> Position:
        """Put the run back to its last checkpoint; the first position where there is none.

        Raises:
            InputError: the state is damaged.
        """

        def put_back(state: dict[str, Any]) -> None:
            self.net.load_state_dict(state["net"])
            self.optimizer.load_state_dict(state["optimizer"])

        return restore(self.directory, self.device, put_back)


def _seed(*key: int) -> int:
    return int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0]) & (2**63 - 1)
