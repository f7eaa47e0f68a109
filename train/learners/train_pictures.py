"""``fnpipe train`` for models that read pictures: a run set up, or found where it stopped, and seen through."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from fnpipe.mining.discriminators.protocol import Discriminator
from fnpipe.pipeline.errors import InputError
from fnpipe.pipeline.machine.processes import available_cpus
from fnpipe.pipeline.workspace.record import FORMAT_VERSION
from fnpipe.pipeline.workspace.workspace import Workspace, reading
from fnpipe.train.data.pictures import fits_in_memory
from fnpipe.train.data.plans import batches_of_rank
from fnpipe.train.distributed import World, processes
from fnpipe.train.evaluation.queries import read_queries
from fnpipe.train.falcon.keys import check_reward
from fnpipe.train.judges.itm import load_discriminator
from fnpipe.train.keys import TINY
from fnpipe.train.learners.inputs import cut_captions, init_digest, open_inputs
from fnpipe.train.learners.keys import TrainConfig, make_config, resolve
from fnpipe.train.learners.pictures import Training
from fnpipe.train.loop.session import (
    AfterStep,
    Report,
    _alone,
    asked_values,
    deterministic,
    earlier_record,
    require_inputs,
    stop_signals,
)
from fnpipe.train.model.load import model_file, starting_model
from fnpipe.train.runs.directory import reading_runs, run_directory


def train(
    workspace: Workspace,
    values: Mapping[str, Any],
    *,
    run: str,
    resume: bool = False,
    overwrite: bool = False,
    report: Report = lambda line: None,
    after_step: AfterStep = lambda step: None,
    con_d: Discriminator | None = None,
) -> dict[str, Any]:
    """Train, and leave ``runs/<run>/``; a run that was interrupted goes on, a finished one is left as it is.

    Args:
        values: of `TrainConfig`, checked by `read_values`. resume: those not given are as the run was started.
        report: takes a line for people after every epoch. con_d: in the place of the one that ``agreement`` names.

    Returns:
        The summary that also stands in ``config.json`` as ``result``.

    Raises:
        InputError: a value, a file or a stage is at fault; or a loss is no number.
        KeyboardInterrupt: the run was asked to stop (SIGTERM, SIGINT), and has saved its state.
    """
    directory = run_directory(workspace, run)
    with processes(str(values.get("device", "auto"))) as group, _alone(workspace, run, group):
        before = None if overwrite else earlier_record(workspace.stage(f"runs/{run}"))
        asked = asked_values(directory, before, values, resume)
        if before is not None and before.get("complete"):
            result: dict[str, Any] = before["result"]
            return result
        config = make_config(asked)
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        read = [config.init, config.agreement] if group.first else []
        with deterministic(group.device), reading_runs(workspace, read, "fnpipe train"):
            training = _prepare(workspace, config, asked, before, directory, group, overwrite)
            training.report, training.after_step = report, after_step
            if con_d is None and config.agreement is not None:
                con_d = load_discriminator(config.agreement, workspace, group.device)
            training.con_d = con_d
            try:
                held = reading(workspace, training.inputs.digests, "fnpipe train") if group.first else nullcontext()
                with held, stop_signals(training.ask_to_stop):
                    return training.run(run)
            finally:
                training.close()


def _prepare(
    workspace: Workspace,
    config: TrainConfig,
    asked: Mapping[str, Any],
    before: Mapping[str, Any] | None,
    directory: Path,
    group: World,
    overwrite: bool,
) -> Training:
    """Open everything, choose what was left open, and write ``config.json``; nothing is trained yet."""
    torch.manual_seed(config.seed)
    of_model = ("grad_checkpointing", "itc_loss", "text_attention", "image_size", "fusion_layers")
    options = {key: getattr(config, key) for key in of_model}
    model = starting_model(workspace, config.model, config.init, options)
    architecture = model.config.architecture
    check_reward(config, architecture, model.captions)
    inputs = open_inputs(workspace, config, architecture)
    weights = model_file(config.init, workspace) if config.init is not None else None
    digests = {**inputs.digests, **init_digest(config.init, weights)}
    cuda = group.device.type == "cuda"
    small = config.augment in ("tiny", "none") or (config.augment == "auto" and architecture == TINY)
    kept = (
        not config.workers
        and inputs.stream is None
        and fits_in_memory(len(inputs.image_ids), model.image_size, config.cache_mib << 20)
    )
    if before is not None:
        # What a run was begun with stays; the rule by which it was chosen may be another one today.
        config = dataclasses.replace(config, evaluate_on=before["config"]["evaluate_on"])
    config = resolve(
        config,
        architecture=architecture,
        itc_loss=model.config.itc_loss,
        text_attention=model.config.text_attention,
        batches_per_epoch=len(batches_of_rank(inputs.batches_per_epoch, group.rank, group.world)),
        batch_size=inputs.source.batch_size,
        grouped=inputs.source.grouped,
        splits=list(workspace.splits()),
        cached=small and kept,
        cuda=cuda,
        bf16=cuda and torch.cuda.is_bf16_supported(),
        cores=available_cpus(),
        thresholds=inputs.thresholds,
    )
    require_inputs(directory, before, digests)
    if before is not None and before["data"]["processes"] != group.world:
        raise InputError(f"{directory}: started with {before['data']['processes']} processes, now {group.world}")
    queries = (
        read_queries(workspace, config.evaluate_on, config.evaluate_images, config.seed)
        if config.evaluate_every
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
            "batches_per_epoch": inputs.batches_per_epoch,
            "processes": group.world,
            "grouped": inputs.source.grouped,
        },
        "model": json.loads(json.dumps(dataclasses.asdict(model.config))),
        "torch": torch.__version__,
    }
    if group.first and (notes := cut_captions(inputs.samples, inputs.pair_ids, model.tokenizer)):
        record["notes"] = notes
    # Everything has been checked: only now may what is there be touched.
    group.wait()
    if group.first:
        workspace.stage(f"runs/{directory.name}").start(record, overwrite=overwrite)
    return Training(config, inputs, model.to(group.device), group, directory, record, queries)
