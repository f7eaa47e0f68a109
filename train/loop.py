"""``fnpipe train``: one loop for every method, alone or under torchrun, that can stop anywhere and go on from there."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel

from fnpipe.pipeline import atomic
from fnpipe.pipeline.errors import InputError
from fnpipe.pipeline.progress import Advance, progress
from fnpipe.pipeline.transform import Transform
from fnpipe.pipeline.workspace import FORMAT_VERSION, Workspace
from fnpipe.train.augment import make_augment
from fnpipe.train.batches import Batch, FullPixels, Loader, Pixels, TinyPixels, share
from fnpipe.train.checkpoints import load_state, save_state, save_weights, truncate
from fnpipe.train.config import FREE_ON_RESUME, TrainConfig, make_config, resolve
from fnpipe.train.evaluate import Queries, evaluate_model, read_queries
from fnpipe.train.inputs import Inputs, init_digest, open_inputs
from fnpipe.train.log import Log, plot_losses, read_metrics
from fnpipe.train.model import VLModel
from fnpipe.train.objectives import Decisions, EcmConfig
from fnpipe.train.pictures import FittedPictures, fits_in_memory
from fnpipe.train.processes import Processes, processes
from fnpipe.train.runs import CONFIG, METRICS, model_file, read_run_config, run_directory, starting_model
from fnpipe.train.step import (
    StepConfig,
    StepInput,
    TrainStep,
    false_negatives,
    learning_rate,
    mask_generator,
    parameter_groups,
)

Report = Callable[[str], None]
# Called after every optimiser step with its number, counted from 1.
AfterStep = Callable[[int], None]

_DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def train(
    workspace: Workspace,
    values: Mapping[str, Any],
    *,
    run: str,
    resume: bool = False,
    overwrite: bool = False,
    report: Report = lambda line: None,
    after_step: AfterStep = lambda step: None,
) -> dict[str, Any]:
    """Train, and leave ``runs/<run>/``; a run that was interrupted goes on, a finished one is left as it is.

    Args:
        values: of `TrainConfig`, checked by `read_values`. resume: those not given are as the run was started.
        report: takes a line for people after every epoch.

    Returns:
        The summary that also stands in ``config.json`` as ``result``.

    Raises:
        InputError: a value, a file or a stage is at fault; or a loss is no number.
        KeyboardInterrupt: the run was asked to stop (SIGTERM, SIGINT), and has saved its state.
    """
    directory = run_directory(workspace, run)
    with processes(str(values.get("device", "auto"))) as group:
        before = None if overwrite or not (directory / CONFIG).exists() else read_run_config(directory)
        asked = _asked(directory, before, values, resume)
        if before is not None and before.get("complete"):
            result: dict[str, Any] = before["result"]
            return result
        group.wait()
        if group.first and overwrite and directory.exists():
            shutil.rmtree(directory)
        config = make_config(asked)
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        with _deterministic(group.device):
            training = _prepare(workspace, config, asked, before, directory, group)
            training.report, training.after_step = report, after_step
            try:
                with _stop_signals(training.ask_to_stop):
                    return training.run(run)
            finally:
                training.close()


def _asked(
    directory: Path, before: Mapping[str, Any] | None, values: Mapping[str, Any], resume: bool
) -> dict[str, Any]:
    """The values of a new run, or those of the one that goes on.

    Raises:
        InputError: there is nothing to resume, or the values differ from those that the run was started with.
    """
    if before is None:
        if resume:
            raise InputError(f"{directory}: no run to resume; leave --resume out to start one")
        return dict(values)
    started = {key: value for key, value in before["asked"].items() if key not in values} if resume else {}
    asked = {**started, **values}
    for key in sorted({*asked, *before["asked"]} - FREE_ON_RESUME):
        old, new = before["asked"].get(key), asked.get(key)
        # A flag that says what would have been chosen anyway is no difference.
        if old != new and not (new is not None and new == before["config"].get(key)):
            raise InputError(
                f"{directory}: started with {key} {'unset' if old is None else old}, "
                f"now {'unset' if new is None else new}; use another --run, or --overwrite to start afresh"
            )
    # The values as they were written first, so that equal runs leave equal records.
    return {**asked, **{k: v for k, v in before["asked"].items() if k not in FREE_ON_RESUME}}


def _prepare(
    workspace: Workspace,
    config: TrainConfig,
    asked: Mapping[str, Any],
    before: Mapping[str, Any] | None,
    directory: Path,
    group: Processes,
) -> _Training:
    """Open everything, choose what was left open, and write ``config.json``; nothing is trained yet."""
    torch.manual_seed(config.seed)
    model = starting_model(workspace, config.model, config.init, config.grad_checkpointing)
    architecture = model.config.architecture
    inputs = open_inputs(workspace, config, architecture)
    weights = model_file(config.init, workspace) if config.init is not None else None
    digests = {**inputs.digests, **init_digest(config.init, weights)}
    cuda = group.device.type == "cuda"
    tiny_pixels = config.augment in ("auto", "tiny", "none")
    kept = not config.workers and fits_in_memory(len(inputs.image_ids), model.image_size, config.cache_mib << 20)
    config = resolve(
        config,
        architecture=architecture,
        batches_per_epoch=len(share(len(inputs.source.epoch(0)), group.rank, group.world)),
        batch_size=inputs.source.batch_size,
        grouped=inputs.source.grouped,
        splits=list(workspace.splits()),
        cached=tiny_pixels and kept,
        cuda=cuda,
        bf16=cuda and torch.cuda.is_bf16_supported(),
        cores=os.cpu_count() or 1,
        thresholds=inputs.thresholds,
    )
    if before is not None and before["inputs"] != digests:
        changed = sorted(k for k in {*before["inputs"], *digests} if before["inputs"].get(k) != digests.get(k))
        raise InputError(f"{directory}: started from other {', '.join(changed)}; use another --run, or --overwrite")
    if before is not None and before["data"]["processes"] != group.world:
        raise InputError(f"{directory}: started with {before['data']['processes']} processes, now {group.world}")
    queries = (
        read_queries(workspace, config.evaluate_on, config.evaluate_images, config.seed)
        if (config.evaluate_every)
        else None
    )
    record = {
        "format": FORMAT_VERSION,
        "complete": False,
        "config": dataclasses.asdict(config),
        "asked": dict(asked),
        "inputs": digests,
        "data": {
            "images": len(inputs.image_ids),
            "batches_per_epoch": len(inputs.source.epoch(0)),
            "processes": group.world,
            "grouped": inputs.source.grouped,
        },
        "model": json.loads(json.dumps(dataclasses.asdict(model.config))),
        "torch": torch.__version__,
    }
    group.wait()
    if group.first:
        atomic.sweep(directory) if directory.exists() else None
        atomic.write_json(directory / CONFIG, record)
    return _Training(config, inputs, model.to(group.device), group, directory, record, queries)


class _Training:
    """The state of a run in work."""

    report: Report
    after_step: AfterStep

    def __init__(
        self,
        config: TrainConfig,
        inputs: Inputs,
        model: VLModel,
        group: Processes,
        directory: Path,
        record: dict[str, Any],
        queries: Queries | None,
    ) -> None:
        self.config, self.inputs, self.model, self.group = config, inputs, model, group
        self.directory, self.record, self.queries = directory, record, queries
        self.loader = Loader(
            samples=inputs.samples,
            pixels=_pixels(config, inputs, model),
            tokenize=model.tokenizer,
            edges=inputs.edges,
            identity=inputs.identity,
            workers=int(config.workers or 0),
        )
        self.step = TrainStep(model, _step_config(config, inputs, group))
        # Under itc the fusion encoder and the heads get no gradient, which DDP must be told to expect.
        whole = bool(config.itm and config.mlm)
        self.parallel: Any = self.step
        if group.world > 1:
            self.parallel = DistributedDataParallel(
                self.step, broadcast_buffers=False, find_unused_parameters=not whole
            )
        self.optimizer = torch.optim.AdamW(parameter_groups(model, config.weight_decay), lr=0.0, fused=True)
        self.scaler = torch.amp.GradScaler(group.device.type, enabled=config.precision == "fp16")
        self.position = load_state(directory, model, self.optimizer, self.scaler)
        # So that a process that starts a moment later does not read a state that is newer than the others'.
        group.wait()
        if group.first:
            truncate(directory / METRICS, self.position.log_bytes)
        self.log = Log(directory, config.tensorboard, self.position.step) if group.first else None
        self.total = self._steps_per_epoch() * int(config.epochs or 0)
        self.stopping = False

    def ask_to_stop(self) -> None:
        """Stop after the step in work."""
        self.stopping = True

    def close(self) -> None:
        if self.log is not None:
            self.log.close()

    def _steps_per_epoch(self) -> int:
        batches = len(share(len(self.inputs.source.epoch(0)), self.group.rank, self.group.world))
        if not batches:
            raise InputError(
                f"{len(self.inputs.source.epoch(0))} batches an epoch are too few for {self.group.world} processes"
            )
        return math.ceil(batches / self.config.accumulate)

    def run(self, name: str) -> dict[str, Any]:
        """All epochs that are left; the summary."""
        start = time.monotonic()
        left = self.total - self.position.step
        bar = progress(f"training {name}", left, "steps") if self.group.first else nullcontext(lambda n: None)
        with bar as advance:
            while self.position.epoch < int(self.config.epochs or 0):
                self._epoch(advance)
        return self._finish(name, time.monotonic() - start)

    def _epoch(self, advance: Advance) -> None:
        """The rest of the epoch in work, its evaluation, and its checkpoint."""
        self.model.train()
        epoch = self.position.epoch
        plan = self.inputs.source.epoch(epoch)
        mine = share(len(plan), self.group.rank, self.group.world)[self.position.batches :]
        with _closing(self.loader.batches(plan, epoch, mine)) as batches:
            while True:
                start = time.monotonic()
                some = list(itertools.islice(batches, self.config.accumulate))
                if not some:
                    break
                waited = time.monotonic() - start
                values = self._optimise(some)
                self._count(some, values, waited, time.monotonic() - start)
                advance(1)
                self.after_step(self.position.step)
                self._stop_or_save()
        self.position.epoch, self.position.batches = epoch + 1, 0
        self._end_epoch(epoch)
        self._save()

    def _optimise(self, batches: list[Batch]) -> dict[str, float]:
        """One optimiser step over the batches; the means of what it measured."""
        config, position = self.config, self.position
        smoothing = float(config.smoothing or 0.0) if position.epoch >= config.smoothing_start_epoch else 0.0
        rate = learning_rate(
            position.step,
            total=self.total,
            warmup=int(config.warmup_steps or 0),
            peak=float(config.lr or 0.0),
            min_ratio=config.min_lr_ratio,
        )
        for parameters in self.optimizer.param_groups:
            parameters["lr"] = rate
        self.optimizer.zero_grad(set_to_none=True)
        measured = []
        for i, batch in enumerate(batches):
            if self.step.config.gather_world > 1 and len(batch) != self.inputs.source.batch_size:
                raise InputError(
                    f"epoch {batch.epoch}, batch {batch.number}: {len(batch)} of {self.inputs.source.batch_size} rows "
                    "could be read, and gathering takes full batches; train with gather=false"
                )
            last = i == len(batches) - 1
            with nullcontext() if last or self.group.world == 1 else self.parallel.no_sync():
                total, losses, decisions = self.parallel(
                    StepInput.of(batch, self.group.device),
                    smoothing,
                    mask_generator(config.seed, batch.epoch, batch.number),
                )
                measured.append(self._measure(batch, total, losses, decisions))
                self._require_finite(measured[-1]["loss"], "loss", [batch])
                self.scaler.scale(total / len(batches)).backward()
        self.scaler.unscale_(self.optimizer)
        norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), config.clip_norm or math.inf))
        if not self.scaler.is_enabled():
            self._require_finite(norm, "gradient", batches)
        temperature = float(self.model.temp.detach())
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.model.clamp_temperature()
        means = self.group.mean({key: float(np.mean([m[key] for m in measured])) for key in measured[0]})
        return {**means, "temp": temperature, "lr": rate, "grad_norm": norm if math.isfinite(norm) else -1.0}

    def _measure(
        self, batch: Batch, total: torch.Tensor, losses: Mapping[str, torch.Tensor], decisions: Decisions
    ) -> dict[str, float]:
        """What metrics.jsonl says of one batch; one transfer from the device."""
        names = ["loss", *losses, *decisions.counts]
        numbers = torch.stack([v.detach().double() for v in (total, *losses.values(), *decisions.counts.values())])
        values = dict(zip(names, numbers.tolist(), strict=True))
        counts = {name: values.pop(name) for name in decisions.counts}
        if batch.p is not None:
            values["coverage"] = counts["scored"] / max(counts["hardest"], 1)
            values |= {
                "positives": counts["positive"],
                "ambiguous": counts["ambiguous"],
                "mlm_joined": counts["joined"],
            }
        if self.inputs.truth is not None:
            found, hardest = false_negatives(batch, decisions, self.inputs.truth.matches)
            values["false_negatives"] = found / max(hardest, 1)
        return values

    def _require_finite(self, value: float, what: str, batches: list[Batch]) -> None:
        """Stop the run, in every process, where a value is no number; the weights are still those before this step.

        Raises:
            InputError: it is none, here or elsewhere.
        """
        if not self.group.any(not math.isfinite(value)):
            return
        self._save()
        if math.isfinite(value):
            raise InputError(f"{self.directory}: the {what} of another process is no number; see its message")
        plan = self.inputs.source.epoch(self.position.epoch)
        rows = ", ".join(f"{plan.starts[b.number]}-{plan.starts[b.number + 1] - 1}" for b in batches)
        pairs = " ".join(map(str, np.concatenate([b.pair_ids for b in batches])))
        raise InputError(
            f"{self.directory}: the {what} is {value} in epoch {self.position.epoch}, step {self.position.step + 1}, "
            f"batch {', '.join(str(b.number) for b in batches)} (plan rows {rows}; pair_ids {pairs}); the state before "
            "it is saved: look at these pairs, or train with a lower lr"
        )

    def _count(self, batches: list[Batch], values: dict[str, float], waited: float, took: float) -> None:
        """Move on by the batches just done, and log them."""
        images = sum(map(len, batches)) * self.group.world
        self.position.batches += len(batches)
        self.position.step += 1
        self.position.seen += images
        if self.log is None:
            return
        line: dict[str, Any] = {"epoch": self.position.epoch, "batch": batches[0].number, **values}
        if unreadable := sum(b.unreadable for b in batches):
            line["unreadable"] = unreadable
        line |= {"images_per_s": images / took, "wait_share": waited / took}
        self.log.write("step", self.position.step, line)

    def _stop_or_save(self) -> None:
        """Stop where a signal asked for it, in any process; else save every ``checkpoint_steps``.

        Raises:
            KeyboardInterrupt: the run stops; its state is saved.
        """
        if self.group.any(self.stopping):
            self._save()
            raise KeyboardInterrupt
        if self.position.step % self.config.checkpoint_steps == 0:
            self._save()

    def _save(self) -> None:
        if self.log is None:
            return
        self.position.log_bytes = self.log.length()
        save_state(self.directory, self.position, self.model, self.optimizer, self.scaler)

    def _end_epoch(self, epoch: int) -> None:
        """Evaluate where it is time to, keep the best weights, and say how it goes."""
        config = self.config
        last = epoch + 1 == config.epochs
        due = self.queries is not None and (last or (epoch + 1) % max(config.evaluate_every, 1) == 0)
        if self.log is not None:
            figures = self._evaluate(epoch) if due else {}
            if config.keep_every and (epoch + 1) % config.keep_every == 0:
                save_weights(self.directory, f"epoch-{epoch:03d}", self.model)
            self.report(self._epoch_line(epoch, figures))
        self.group.wait()

    def _evaluate(self, epoch: int) -> dict[str, float]:
        """Evaluate, log, and keep the weights if they are the best so far; the figures that decide."""
        assert self.queries is not None
        assert self.log is not None
        self.model.eval()
        found = evaluate_model(
            self.inputs.workspace,
            self.model,
            self.queries,
            self.inputs.truth,
            rerank=bool(self.config.itm),
            samples=self.inputs.samples,
            quiet=True,
        )
        self.model.train()
        lists = {name: found[name] for name in ("dual", "itm") if name in found}
        flat = {f"{name}_{key}": value for name, values in lists.items() for key, value in values.items()}
        self.log.write("evaluation", self.position.step, {"epoch": epoch, **flat})
        deciding: dict[str, float] = lists.get("itm", lists["dual"])
        score = deciding.get("map_at_r", deciding["rsum"])
        if self.position.best is None or score > self.position.best:
            self.position.best = score
            save_weights(self.directory, "best", self.model)
        return deciding

    def _epoch_line(self, epoch: int, figures: Mapping[str, float]) -> str:
        assert self.log is not None
        self.log.length()
        lines = [line for line in read_metrics(self.directory, "step") if line["epoch"] == epoch]
        means = {k: np.mean([line[k] for line in lines]) for k in (*self._loss_names(), "coverage") if k in lines[0]}
        said = [f"{name} {value:.3f}" for name, value in means.items()]
        said += [f"{k} {figures[k]:.1f}" for k in ("tr_r1", "ir_r1", "map_at_r") if k in figures]
        return f"epoch {epoch + 1} of {self.config.epochs}: {', '.join(said)}"

    def _loss_names(self) -> list[str]:
        flags = {"itm": self.config.itm, "mlm": self.config.mlm, "consistency": self.config.consistency}
        return ["loss", "itc", *(name for name, used in flags.items() if used)]

    def _finish(self, name: str, seconds: float) -> dict[str, Any]:
        """Mark the run as complete; its summary."""
        result: dict[str, Any] = {
            "run": name,
            "method": self.config.method,
            "model": self.config.model,
            "epochs": self.config.epochs,
            "steps": self.position.step,
            "images_seen": self.position.seen,
            "seconds": round(seconds, 1),
        }
        if self.log is not None:
            self.log.length()
            steps, evaluations = read_metrics(self.directory, "step"), read_metrics(self.directory, "evaluation")
            result["unreadable"] = sum(line.get("unreadable", 0) for line in steps)
            result["losses"] = {key: steps[-1][key] for key in self._loss_names()}
            result["evaluation"] = (
                {k: v for k, v in evaluations[-1].items() if k not in ("kind",)} if evaluations else None
            )
            plot_losses(self.directory, self._loss_names())
            atomic.write_json(self.directory / CONFIG, {**self.record, "complete": True, "result": result})
        self.group.wait()
        return result


def _pixels(config: TrainConfig, inputs: Inputs, model: VLModel) -> Pixels:
    """Pictures at the input size, kept in memory where they fit, for mild augmentation; else from their full size."""
    transform, flip = Transform.of(dict(model.config.preprocess or {})), bool(config.flip)
    if config.augment in ("tiny", "none"):
        budget = 0 if config.workers else config.cache_mib << 20
        pictures = FittedPictures(inputs.samples, transform, model.image_size, inputs.image_ids, budget)
        return TinyPixels(pictures, config.seed, flip, plain=config.augment == "none")
    augment = make_augment(config.augment, model.image_size, flip, transform)
    return FullPixels(inputs.samples, model.image_size, augment, config.seed)


def _step_config(config: TrainConfig, inputs: Inputs, group: Processes) -> StepConfig:
    gathering = config.gather and group.world > 1
    return StepConfig(
        itm=bool(config.itm),
        mlm=bool(config.mlm),
        ecm=_ecm_config(config),
        mask_rate=config.mask_rate,
        consistency=config.consistency,
        dtype=_DTYPES[config.precision],
        gather_world=group.world if gathering else 1,
        gather_rank=group.rank if gathering else 0,
    )


def _ecm_config(config: TrainConfig) -> EcmConfig:
    """Methods without ECM may be given edges to count with: they change nothing there."""
    return EcmConfig(
        tau_low=config.tau_low if config.tau_low is not None else EcmConfig.tau_low,
        tau_high=config.tau_high if config.tau_high is not None else EcmConfig.tau_high,
        false_negatives=config.false_negatives if config.method_losses.ecm else "ignore",  # type: ignore[arg-type]
        unscored=config.unscored if config.method_losses.ecm else "negative",  # type: ignore[arg-type]
        second=config.second,  # type: ignore[arg-type]
    )


@contextmanager
def _closing(batches: Iterator[Batch]) -> Iterator[Iterator[Batch]]:
    """Stop the thread that loads ahead, however the caller leaves."""
    try:
        yield batches
    finally:
        batches.close()  # type: ignore[attr-defined]


@contextmanager
def _deterministic(device: torch.device) -> Iterator[None]:
    """On a CPU the same weights every time: without this, gradients of gathered rows are summed in any order."""
    if device.type != "cpu":
        yield
        return
    memory: Any = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled(), memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    # Clearing every new tensor guards against reading memory that nobody wrote; no operation here does.
    memory.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        memory.fill_uninitialized_memory = before[1]


@contextmanager
def _stop_signals(ask: Callable[[], None]) -> Iterator[None]:
    """SIGTERM and SIGINT ask; a second one ends the program at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def handle(number: int, frame: object) -> None:
        signal.signal(number, before[signal.Signals(number)])
        ask()

    for number in before:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
