"""Training models that read pictures and captions, by the methods of `METHODS`."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel

from fnpipe.mining.discriminators.protocol import Discriminator
from fnpipe.pipeline.errors import InputError, counted
from fnpipe.pipeline.machine.processes import available_cpus
from fnpipe.pipeline.workspace.workspace import Workspace
from fnpipe.train.data.batches import Batch
from fnpipe.train.data.pictures import fits_in_memory
from fnpipe.train.data.plans import EpochPlan, batches_each, batches_of_rank
from fnpipe.train.distributed import World
from fnpipe.train.evaluation.both_scores import evaluate_by_both
from fnpipe.train.evaluation.named import fitted_in_training
from fnpipe.train.evaluation.queries import Queries, read_queries
from fnpipe.train.falcon.batches import FalconSource
from fnpipe.train.falcon.keys import ITG, check_reward
from fnpipe.train.falcon.scheduler import Falcon
from fnpipe.train.judges.itm import load_discriminator
from fnpipe.train.judges.weak_head import weak_head
from fnpipe.train.keys import TINY
from fnpipe.train.learners.inputs import Inputs, cut_captions, init_digest, make_loader, open_inputs
from fnpipe.train.learners.keys import Recipe, TrainConfig, resolve
from fnpipe.train.loop.agreement import agreement
from fnpipe.train.loop.learner import Learner
from fnpipe.train.loop.optim import compile_blocks, learning_rate, parameter_groups
from fnpipe.train.model.build import save_model
from fnpipe.train.model.frozen_files import save_beside
from fnpipe.train.model.load import model_file, starting_model
from fnpipe.train.model.model import VLModel
from fnpipe.train.objectives.ecm import Decisions, EcmConfig
from fnpipe.train.objectives.momentum import MOMENTUM, Teacher, follow
from fnpipe.train.objectives.step import StepConfig, StepInput, TrainStep, false_negatives, mask_generator
from fnpipe.train.runs.state import Position, Stateful

_DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def open_pictures(
    workspace: Workspace, config: TrainConfig, world: World, con_d: Discriminator | None = None
) -> PictureLearner:
    """Open what a config names, and choose what it left open.

    Args:
        con_d: in the place of the one that ``agreement`` names.

    Raises:
        InputError: something is missing, damaged or stale, or does not go together.
    """
    torch.manual_seed(config.seed)
    of_model = ("grad_checkpointing", "itc_loss", "text_attention", "image_size", "fusion_layers")
    options = {key: getattr(config, key) for key in of_model}
    model = starting_model(workspace, config.model, config.init, options)
    architecture = model.config.architecture
    check_reward(config, architecture, model.captions)
    inputs = open_inputs(workspace, config, architecture)
    config = dataclasses.replace(config, epochs=inputs.epochs or config.epochs)
    weights = model_file(config.init, workspace) if config.init is not None else None
    inputs.digests.update(init_digest(config.init, weights))
    cuda = world.device.type == "cuda"
    recipe = resolve(
        config,
        architecture=architecture,
        itc_loss=model.config.itc_loss,
        text_attention=model.config.text_attention,
        batches_per_epoch=batches_each(inputs.batches_per_epoch, world.world),
        batch_size=inputs.source.batch_size,
        grouped=inputs.source.grouped,
        splits=list(workspace.splits()),
        cached=_kept_in_memory(config, inputs, model),
        cuda=cuda,
        bf16=cuda and torch.cuda.is_bf16_supported(),
        cores=available_cpus(),
        thresholds=inputs.thresholds,
    )
    if recipe.warm >= recipe.epochs:
        raise InputError(
            f"warm is {recipe.warm}, and of {counted(recipe.epochs, 'epoch')} none would have the plan's batches"
        )
    learner = PictureLearner(recipe, inputs, model.to(world.device), world)
    if config.init is not None and recipe.itm and inputs.begins_hard and world.first:
        learner.notes = [*learner.notes, *weak_head(workspace, model, inputs.samples)]
    if (fitted_on := fitted_in_training(workspace, recipe.dual_weight, recipe.evaluate_on)) is not None:
        learner.fit_on = read_queries(workspace, fitted_on, recipe.evaluate_images, recipe.seed)
    learner.con_d = con_d
    if con_d is None and config.agreement is not None:
        learner.con_d = load_discriminator(config.agreement, workspace, world.device)
    return learner


def _kept_in_memory(config: TrainConfig, inputs: Inputs, model: VLModel) -> bool:
    """Whether the pictures are decoded once, to the model's size, and stay; only mild augmentation begins with that."""
    tiny = config.augment == "auto" and model.config.architecture == TINY
    if config.workers or inputs.stream is not None or not (tiny or config.augment in ("tiny", "none")):
        return False
    return fits_in_memory(len(inputs.image_ids), model.image_size, config.cache_mib << 20)


class PictureLearner(Learner[Batch, VLModel]):
    """A model in training, with its step, its batches, and FALCON where it constructs them."""

    decodes = True
    con_d: Discriminator | None = None
    # What the weight of dual + ITM is fitted on, where it is.
    fit_on: Queries | None = None

    def __init__(self, config: Recipe, inputs: Inputs, model: VLModel, world: World) -> None:
        each = batches_each(inputs.batches_per_epoch, world.world)
        super().__init__(config, world, model, epochs=config.epochs, batches_each=each, accumulate=config.accumulate)
        self.config, self.inputs = config, inputs
        self.loader = make_loader(config, inputs, model)
        self.teacher = Teacher(model, config.queue) if config.distillation or config.queue else None
        self.train_step = TrainStep(model, _step_config(config, world), self.teacher)
        # Under itc the fusion encoder and the heads get no gradient, which DDP must be told to expect.
        whole = config.itm and config.mlm
        self.parallel: Any = self.train_step
        if world.world > 1:
            self.parallel = DistributedDataParallel(self.train_step, find_unused_parameters=not whole)
        # The step's parameters are the model's and, behind them, VACSR's.
        self.optimizer = torch.optim.AdamW(parameter_groups(self.train_step, config.weight_decay), lr=0.0, fused=True)
        self.scaler = torch.amp.GradScaler(world.device.type, enabled=config.precision == "fp16")
        self.falcon = None
        if isinstance(inputs.source, FalconSource):
            self.falcon = Falcon(config, inputs.source, self.loader, self.train_step, world, each * config.epochs)
        if config.compile:
            compile_blocks(model)
        self.digests, self.name, self.losses = inputs.digests, model.config.architecture, _losses(config)
        self.about = _about(inputs, model, world)
        self.notes = cut_captions(inputs.samples, inputs.pair_ids, model.tokenizer) if world.first else []

    def batches(self, epoch: int, done: int) -> Iterator[Batch]:
        if self.falcon is not None:
            return self.falcon.batches(epoch, done)
        plan = self._plan(epoch)
        return self.loader.batches(plan, epoch, batches_of_rank(len(plan), self.world.rank, self.world.world)[done:])

    def _plan(self, epoch: int) -> EpochPlan:
        assert not isinstance(self.inputs.source, FalconSource)
        return self.inputs.source.epoch(epoch)

    def step(self, batches: Sequence[Batch], position: Position) -> dict[str, float]:
        config = self.config
        rate = learning_rate(
            position.step, total=self.steps, warmup=config.warmup_steps, peak=config.lr, min_ratio=config.min_lr_ratio
        )
        for parameters in self.optimizer.param_groups:
            parameters["lr"] = rate
        self.optimizer.zero_grad(set_to_none=True)
        if self.teacher is not None:
            follow(self.teacher.model, self.net, MOMENTUM)
            self.teacher.alpha = config.distillation * min(1.0, position.step * config.epochs / self.steps)
        measured = []
        for i, batch in enumerate(batches):
            last = i == len(batches) - 1
            with nullcontext() if last or self.world.world == 1 else self.parallel.no_sync():
                total, values = self._forward(i, batch, position)
                measured.append(values)
                self.require_finite(values["loss"], "loss", partial(self._where, [batch], position))
                torch.autograd.backward(self.scaler.scale(total / len(batches)))
        self.scaler.unscale_(self.optimizer)
        norm = float(torch.nn.utils.clip_grad_norm_(self.train_step.parameters(), config.clip_norm or math.inf))
        if not self.scaler.is_enabled():
            self.require_finite(norm, "gradient", partial(self._where, batches, position))
        temperature = float(self.net.temp.detach())
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.net.clamp_temperature()
        self.move_average(position.step + 1)
        own = {key: float(np.mean([m[key] for m in measured])) for key in measured[0]}
        if self.falcon is not None:
            own |= self.falcon.after_step()
            self.falcon.commit()
        means = self.world.mean(own)
        said = {**means, "temp": temperature, "lr": rate, "grad_norm": norm if math.isfinite(norm) else -1.0}
        if unreadable := sum(batch.unreadable for batch in batches):
            said["unreadable"] = unreadable
        return said

    def _forward(self, place: int, batch: Batch, position: Position) -> tuple[torch.Tensor, dict[str, float]]:
        """The loss of the step's batch number ``place``, (), and what is measured of it."""
        if self.train_step.config.gather_world > 1 and len(batch) != self.inputs.source.batch_size:
            raise InputError(
                f"epoch {batch.epoch}, batch {batch.number}: {len(batch)} of {self.inputs.source.batch_size} rows "
                "could be read, and gathering takes full batches; train with gather=false"
            )
        config = self.config
        smoothing = config.smoothing if position.epoch >= config.smoothing_start_epoch else 0.0
        moved = dataclasses.replace(StepInput.of(batch, self.world.device), across=self._recorded_across(batch))
        masks = mask_generator(config.seed, batch.epoch, batch.number)
        total, losses, decisions = self.parallel(moved, smoothing, masks)
        if self.falcon is not None:
            self.falcon.after_forward(place, moved, losses)
        if self.teacher is not None:
            self.teacher.remember(batch, self.world)
        return total, self._measure(batch, total, losses, decisions, position.step)

    def _recorded_across(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor] | None:
        """`StepInput.across` of a batch, by what the queue or the other processes' batches hold, which are as large."""
        device = self.world.device
        if self.teacher is not None:
            queue = self.teacher.queue
            images = np.concatenate([batch.image_ids, queue.image_ids.numpy()])
            pairs = np.concatenate([batch.pair_ids, queue.pair_ids.numpy()])
        elif self.train_step.config.gather_world > 1:
            ids = torch.from_numpy(np.stack([batch.image_ids, batch.pair_ids])).to(device)
            images, pairs = torch.cat(self.world.gather(ids), 1).cpu().numpy()
        else:
            return None
        blocks = (
            self.loader.recorded(batch.image_ids[:, None], pairs),
            self.loader.recorded(images, batch.pair_ids[:, None]),
        )
        i2t, t2i = (torch.from_numpy(block).to(device) for block in blocks)
        return i2t, t2i

    def _measure(
        self, batch: Batch, total: torch.Tensor, losses: Mapping[str, torch.Tensor], decisions: Decisions, step: int
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
        if self.con_d is not None and step % self.config.agreement_steps == 0:
            values["agreement"] = agreement(batch, decisions, self.con_d, self.inputs.samples, *self.inputs.thresholds)
        if self.inputs.truth is not None:
            found, hardest = false_negatives(batch, decisions, self.inputs.truth.matches)
            values["false_negatives"] = found / max(hardest, 1)
        return values

    def _where(self, batches: Sequence[Batch], position: Position) -> str:
        """Which rows a value was measured on, and what to do if it is no number."""
        rows = ""
        if self.falcon is None:
            starts = self._plan(position.epoch).starts
            rows = ", ".join(f"{starts[b.number]}-{starts[b.number + 1] - 1}" for b in batches)
            rows = f"plan rows {rows}; "
        pairs = " ".join(map(str, np.concatenate([b.pair_ids for b in batches])))
        return (
            f"epoch {position.epoch}, step {position.step + 1}, batch {', '.join(str(b.number) for b in batches)} "
            f"({rows}pair_ids {pairs}); the state before it is saved: look at these pairs, or train with a lower lr"
        )

    def evaluate(self, queries: Queries) -> dict[str, dict[str, float]]:
        inputs, weight = self.inputs, self.config.dual_weight
        weighed = self.fit_on if isinstance(weight, str) else weight
        found = evaluate_by_both(
            inputs.workspace,
            self.product,
            queries,
            inputs.truth,
            rerank=self.config.itm,
            dual_weight=weighed,
            samples=inputs.samples,
            quiet=True,
        )
        if self.fit_on is not None:
            found["both"] |= {"dual_weight": found["dual_weight"]}
        return {name: found[name] for name in ("dual", "itm", "both") if name in found}

    def save(self, path: Path) -> None:
        if self.train_step.vacsr is not None:
            save_beside(path, self.train_step.vacsr, self.product)
        save_model(self.product, path)

    def parts(self) -> dict[str, Stateful | None]:
        taught: dict[str, Stateful | None] = {} if self.teacher is None else {"teacher": self.teacher}
        return taught | {
            "model": self.net,
            "optimizer": self.optimizer,
            "scaler": self.scaler,
            "average": self.average,
            "falcon": self.falcon,
            "vacsr": self.train_step.vacsr,
        }


def _losses(config: Recipe) -> list[str]:
    flags = {"itm": config.itm, "mlm": config.mlm, "itg": config.reward == ITG, "consistency": config.consistency}
    flags["vacsr"] = config.vacsr
    return ["loss", "itc", *(name for name, used in flags.items() if used)]


def _about(inputs: Inputs, model: VLModel, world: World) -> dict[str, Any]:
    data = {
        "images": len(inputs.image_ids),
        "batches_per_epoch": inputs.batches_per_epoch,
        "processes": world.world,
        "grouped": inputs.source.grouped,
    }
    return {"data": data, "model": json.loads(json.dumps(dataclasses.asdict(model.config)))}


def _step_config(config: Recipe, group: World) -> StepConfig:
    gathering = config.gather and group.world > 1
    return StepConfig(
        itm=config.itm,
        mlm=config.mlm,
        ecm=_ecm_config(config),
        mask_rate=config.mask_rate,
        consistency=config.consistency,
        dtype=_DTYPES[config.precision],
        gather_world=group.world if gathering else 1,
        gather_rank=group.rank if gathering else 0,
        itg=config.reward == ITG,
        vacsr=config.vacsr,
        stop_columns=config.itc_columns == "stopped",
    )


def _ecm_config(config: Recipe) -> EcmConfig:
    """Methods without ECM may be given edges to count with: they change nothing there."""
    return EcmConfig(
        false_negatives=config.false_negatives if config.method_losses.ecm else "ignore",
        unscored=config.unscored if config.method_losses.ecm else "negative",
        second=config.second,
        negatives=config.itm_negatives,
        top=config.itm_top,
        easy=config.itm_easy,
    )
