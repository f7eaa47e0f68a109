"""A run in work: its epochs, steps, evaluations and checkpoints. `loop.train` sets it up."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel

from fnpipe.mining.discriminators.protocol import Discriminator
from fnpipe.pipeline.errors import InputError
from fnpipe.pipeline.files import atomic
from fnpipe.pipeline.machine.progress import Advance, progress
from fnpipe.pipeline.workspace.schemas import TEST
from fnpipe.train.data.augment import make_augment
from fnpipe.train.data.batches import Batch, DecodingLoader, FittedLoader, Loader, Pixels
from fnpipe.train.data.pictures import FittedPictures
from fnpipe.train.data.plans import batches_of_rank
from fnpipe.train.distributed import World
from fnpipe.train.evaluation.queries import Queries
from fnpipe.train.evaluation.retrieval import evaluate_model
from fnpipe.train.falcon.batches import FalconSource
from fnpipe.train.falcon.keys import ITG
from fnpipe.train.falcon.scheduler import Falcon
from fnpipe.train.learners.inputs import Inputs
from fnpipe.train.learners.keys import TrainConfig
from fnpipe.train.loop.agreement import agreement
from fnpipe.train.loop.checkpoints import load_state, save_state, save_weights
from fnpipe.train.loop.optim import learning_rate, parameter_groups
from fnpipe.train.loop.session import AfterStep, Report
from fnpipe.train.model.frozen_files import save_beside
from fnpipe.train.model.model import VLModel
from fnpipe.train.objectives.ecm import Decisions, EcmConfig
from fnpipe.train.objectives.step import StepConfig, StepInput, TrainStep, false_negatives, mask_generator
from fnpipe.train.runs.directory import CHECKPOINTS, CONFIG, METRICS, checkpoint_digests
from fnpipe.train.runs.log import Log, epoch_line, read_metrics
from fnpipe.train.runs.plots import plot_losses, plot_quantiles
from fnpipe.train.runs.state import truncate

_DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


class Training:
    """The state of a run in work."""

    report: Report
    after_step: AfterStep
    con_d: Discriminator | None = None

    def __init__(
        self,
        config: TrainConfig,
        inputs: Inputs,
        model: VLModel,
        group: World,
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
            stream=inputs.stream,
        )
        self.step = TrainStep(model, _step_config(config, group))
        # Under itc the fusion encoder and the heads get no gradient, which DDP must be told to expect.
        whole = bool(config.itm and config.mlm)
        self.parallel: Any = self.step
        if group.world > 1:
            self.parallel = DistributedDataParallel(self.step, find_unused_parameters=not whole)
        # The step's parameters are the model's and, behind them, VACSR's.
        self.optimizer = torch.optim.AdamW(parameter_groups(self.step, config.weight_decay), lr=0.0, fused=True)
        self.scaler = torch.amp.GradScaler(group.device.type, enabled=config.precision == "fp16")
        # What is evaluated and saved for use: the model itself, or the exponential mean of its weights.
        self.average = copy.deepcopy(model).requires_grad_(False) if config.ema_decay else None
        self.falcon = self._make_falcon()
        self.position = load_state(
            directory, model, self.optimizer, self.scaler, self.average, self.falcon, self.step.vacsr
        )
        if config.compile:
            compile_blocks(model)
        # So that a process that starts a moment later does not read a state that is newer than the others'.
        group.wait()
        if group.first:
            truncate(directory / METRICS, self.position.log_bytes)
        self.log = Log(directory, config.tensorboard, self.position.step) if group.first else None
        self.total = self._steps_per_epoch() * int(config.epochs or 0)
        self.stopping = False

    def _make_falcon(self) -> Falcon | None:
        source = self.inputs.source
        if not isinstance(source, FalconSource):
            return None
        rounds = self.inputs.batches_per_epoch // self.group.world * int(self.config.epochs or 0)
        return Falcon(self.config, source, self.loader, self.step, self.group, rounds)

    def ask_to_stop(self) -> None:
        """Stop after the step in work."""
        self.stopping = True

    def close(self) -> None:
        if self.log is not None:
            self.log.close()

    def _steps_per_epoch(self) -> int:
        batches = len(batches_of_rank(self.inputs.batches_per_epoch, self.group.rank, self.group.world))
        if not batches:
            raise InputError(
                f"{self.inputs.batches_per_epoch} batches an epoch are too few for {self.group.world} processes"
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
        with _closing(self._batches(epoch)) as batches:
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

    def _batches(self, epoch: int) -> Iterator[Batch]:
        """This process's share of the epoch's batches, without those that are done."""
        source = self.inputs.source
        if isinstance(source, FalconSource):
            assert self.falcon is not None
            return self.falcon.batches(epoch, self.position.batches)
        plan = source.epoch(epoch)
        mine = batches_of_rank(len(plan), self.group.rank, self.group.world)[self.position.batches :]
        return self.loader.batches(plan, epoch, mine)

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
                moved = dataclasses.replace(StepInput.of(batch, self.group.device), across=self._recorded_across(batch))
                total, losses, decisions = self.parallel(
                    moved, smoothing, mask_generator(config.seed, batch.epoch, batch.number)
                )
                if self.falcon is not None:
                    self.falcon.after_forward(i, moved, losses)
                measured.append(self._measure(batch, total, losses, decisions))
                self._require_finite(measured[-1]["loss"], "loss", [batch])
                self.scaler.scale(total / len(batches)).backward()
        self.scaler.unscale_(self.optimizer)
        norm = float(torch.nn.utils.clip_grad_norm_(self.step.parameters(), config.clip_norm or math.inf))
        if not self.scaler.is_enabled():
            self._require_finite(norm, "gradient", batches)
        temperature = float(self.model.temp.detach())
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.model.clamp_temperature()
        self._move_average()
        own = {key: float(np.mean([m[key] for m in measured])) for key in measured[0]}
        if self.falcon is not None:
            own |= self.falcon.after_step()
        means = self.group.mean(own)
        return {**means, "temp": temperature, "lr": rate, "grad_norm": norm if math.isfinite(norm) else -1.0}

    def _recorded_across(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor] | None:
        """`StepInput.across` of a batch, by what the other processes' batches hold, which are as large."""
        device = self.group.device
        if self.step.config.gather_world == 1:
            return None
        ids = torch.from_numpy(np.stack([batch.image_ids, batch.pair_ids])).to(device)
        images, pairs = torch.cat(self.group.gather(ids), 1).cpu().numpy()
        blocks = (
            self.loader.recorded(batch.image_ids[:, None], pairs),
            self.loader.recorded(images, batch.pair_ids[:, None]),
        )
        i2t, t2i = (torch.from_numpy(block).to(device) for block in blocks)
        return i2t, t2i

    def _move_average(self) -> None:
        """One step of the exponential mean; in the first steps it follows faster, to forget the start."""
        if self.average is None:
            return
        step = self.position.step + 1
        decay = min(self.config.ema_decay, (1 + step) / (10 + step))
        with torch.no_grad():
            torch._foreach_lerp_(list(self.average.parameters()), list(self.model.parameters()), 1 - decay)
            # Batch normalisation's statistics are means already, and its counters whole numbers.
            for mine, theirs in zip(self.average.buffers(), self.model.buffers(), strict=True):
                mine.copy_(theirs)

    @property
    def product(self) -> VLModel:
        """The model that is evaluated and saved for use."""
        return self.model if self.average is None else self.average

    def _measure(
        self, batch: Batch, total: torch.Tensor, losses: Mapping[str, torch.Tensor], decisions: Decisions
    ) -> dict[str, float]:
        """What metrics.jsonl says of one batch; one transfer from the device."""
        names = ["loss", *losses, *decisions.counts]
        numbers = torch.stack([v.detach().double() for v in (total, *losses.values(), *decisions.counts.values())])
        values = dict(zip(names, numbers.tolist(), strict=True))
        counts = {name: values.pop(name) for name in decisions.counts}
        if batch.label is not None:
            values["coverage"] = counts["scored"] / max(counts["hardest"], 1)
            values |= {
                "positives": counts["positive"],
                "ambiguous": counts["ambiguous"],
                "mlm_joined": counts["joined"],
            }
            if self.falcon is not None:
                values["mined_share"] = counts["positive"] / max(counts["hardest"], 1)
        if self.con_d is not None and self.position.step % self.config.agreement_steps == 0:
            values["agreement"] = agreement(batch, decisions, self.con_d, self.inputs.samples, *self.inputs.thresholds)
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
        rows, source = "", self.inputs.source
        if not isinstance(source, FalconSource):
            plan = source.epoch(self.position.epoch)
            rows = ", ".join(f"{plan.starts[b.number]}-{plan.starts[b.number + 1] - 1}" for b in batches)
            rows = f"plan rows {rows}; "
        pairs = " ".join(map(str, np.concatenate([b.pair_ids for b in batches])))
        raise InputError(
            f"{self.directory}: the {what} is {value} in epoch {self.position.epoch}, step {self.position.step + 1}, "
            f"batch {', '.join(str(b.number) for b in batches)} ({rows}pair_ids {pairs}); the state before "
            "it is saved: look at these pairs, or train with a lower lr"
        )

    def _count(self, batches: list[Batch], values: dict[str, float], waited: float, took: float) -> None:
        """Move on by the batches just done, and log them."""
        images = sum(map(len, batches)) * self.group.world
        self.position.batches += len(batches)
        self.position.step += 1
        self.position.seen += images
        if self.falcon is not None:
            self.falcon.commit()
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
        vacsr = self.step.vacsr
        # Before the state, which a run that is killed in between does not have yet, and so writes all again.
        self._save_vacsr("last")
        save_state(
            self.directory, self.position, self.model, self.optimizer, self.scaler, self.average, self.falcon, vacsr
        )

    def _save_weights(self, name: str) -> None:
        save_weights(self.directory, name, self.product)
        self._save_vacsr(name)

    def _save_vacsr(self, name: str) -> None:
        """Write VACSR's network, if there is one, beside the weights to whose embeddings it belongs."""
        if self.step.vacsr is not None:
            save_beside(self.directory / CHECKPOINTS / f"{name}.safetensors", self.step.vacsr, self.product)

    def _end_epoch(self, epoch: int) -> None:
        """Evaluate where it is time to, keep the best weights, and say how it goes."""
        config = self.config
        last = epoch + 1 == config.epochs
        due = self.queries is not None and (last or (epoch + 1) % max(config.evaluate_every, 1) == 0)
        if self.log is not None:
            figures = self._evaluate(epoch) if due else {}
            if config.keep_every and (epoch + 1) % config.keep_every == 0:
                self._save_weights(f"epoch-{epoch:03d}")
            self.report(self._epoch_line(epoch, figures))
        self.group.wait()

    def _evaluate(self, epoch: int) -> dict[str, float]:
        """Evaluate, log, and keep the weights if they are the best so far; the figures that decide which are."""
        assert self.queries is not None
        assert self.log is not None
        self.product.eval()
        found = evaluate_model(
            self.inputs.workspace,
            self.product,
            self.queries,
            self.inputs.truth,
            rerank=bool(self.config.itm),
            samples=self.inputs.samples,
            quiet=True,
        )
        self.product.train()
        lists = {name: found[name] for name in ("dual", "itm") if name in found}
        flat = {f"{name}_{key}": value for name, values in lists.items() for key, value in values.items()}
        self.log.write("evaluation", self.position.step, {"epoch": epoch, **flat})
        deciding: dict[str, float] = lists.get("itm", lists["dual"])
        score = deciding.get("map_at_r", deciding["rsum"])
        if self.queries.on != TEST and (self.position.best is None or score > self.position.best):
            self.position.best = score
            self._save_weights("best")
        return deciding

    def _epoch_line(self, epoch: int, figures: Mapping[str, float]) -> str:
        assert self.log is not None
        self.log.length()
        names = (*self._loss_names(), "coverage", "q", "reward")
        return epoch_line(self.directory, epoch, self.config.epochs, names, figures)

    def _loss_names(self) -> list[str]:
        config = self.config
        flags = {"itm": config.itm, "mlm": config.mlm, "itg": config.reward == ITG, "consistency": config.consistency}
        flags["vacsr"] = config.vacsr
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
            if "notes" in self.record:
                result["notes"] = self.record["notes"]
            plot_losses(self.directory, self._loss_names())
            if self.falcon is not None:
                result["quantiles"] = {key: steps[-1][key] for key in ("q", "u", "reward") if key in steps[-1]}
                plot_quantiles(self.directory)
            done = {"complete": True, "outputs": checkpoint_digests(self.directory), "result": result}
            atomic.write_json(self.directory / CONFIG, {**self.record, **done})
        self.group.wait()
        return result


def _pixels(config: TrainConfig, inputs: Inputs, model: VLModel) -> Pixels:
    """Pictures at the input size, kept in memory where they fit, for mild augmentation; else from their full size."""
    transform, flip = model.transform, bool(config.flip)
    if config.augment in ("tiny", "none"):
        budget = 0 if config.workers or inputs.stream else config.cache_mib << 20
        pictures = FittedPictures(inputs.samples, transform, model.image_size, inputs.image_ids, budget)
        return FittedLoader(pictures, config.seed, flip, plain=config.augment == "none")
    augment = make_augment(config.augment, model.image_size, flip, transform)
    return DecodingLoader(inputs.samples, model.image_size, augment, config.seed)


def _step_config(config: TrainConfig, group: World) -> StepConfig:
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
        itg=config.reward == ITG,
        vacsr=config.vacsr,
    )


def _ecm_config(config: TrainConfig) -> EcmConfig:
    """Methods without ECM may be given edges to count with: they change nothing there."""
    return EcmConfig(
        false_negatives=config.false_negatives if config.method_losses.ecm else "ignore",
        unscored=config.unscored if config.method_losses.ecm else "negative",
        second=config.second,
    )


def compile_blocks(model: torch.nn.Module, backend: str = "inductor") -> None:
    """Compile every transformer block where it stands, so that the names of the weights stay as they are."""
    names = ("ResidualAttentionBlock", "Block", "FusionBlock")
    for module in model.modules():
        if type(module).__name__ in names:
            module.compile(dynamic=True, backend=backend)


@contextmanager
def _closing(batches: Iterator[Batch]) -> Iterator[Iterator[Batch]]:
    """Stop the thread that loads ahead, however the caller leaves."""
    try:
        yield batches
    finally:
        batches.close()  # type: ignore[attr-defined]
