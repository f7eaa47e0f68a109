"""``fnpipe train``: set a run up, or find where it stopped, and see it through."""

from __future__ import annotations

import dataclasses
import json
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from fnpipe.mining.discriminators.protocol import Discriminator
from fnpipe.pipeline.errors import InputError
from fnpipe.pipeline.machine.processes import available_cpus
from fnpipe.pipeline.workspace.record import FORMAT_VERSION, Stage, reading
from fnpipe.pipeline.workspace.workspace import Workspace
from fnpipe.train.data.batches import share
from fnpipe.train.data.pictures import fits_in_memory
from fnpipe.train.distributed import Processes, processes
from fnpipe.train.evaluation.retrieval import read_queries
from fnpipe.train.falcon.keys import check_reward
from fnpipe.train.judges.itm import load_discriminator
from fnpipe.train.learners.inputs import init_digest, open_inputs
from fnpipe.train.learners.keys import FREE_ON_RESUME, TINY, TrainConfig, make_config, resolve
from fnpipe.train.learners.pictures import AfterStep, Report, Training
from fnpipe.train.runs.directory import model_file, read_run_config, run_directory, starting_model


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
        with deterministic(group.device):
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


@contextmanager
def _alone(workspace: Workspace, run: str, group: Processes) -> Iterator[None]:
    """Hold the run against a second training in it; of all processes the one that writes does."""
    with workspace.stage(f"runs/{run}").alone() if group.first else nullcontext():
        yield


def earlier_record(run: Stage) -> dict[str, Any] | None:
    """``config.json`` of a run that was begun before; None where it was not.

    Raises:
        InputError: the run's files are there without it, or its inputs have changed since it was finished.
    """
    run.refuse_unrecorded(overwrite=False)
    if not run.record.exists():
        return None
    record = read_run_config(run.path)
    if record.get("complete"):
        run.require_fresh(record["inputs"])
    return record


def asked_values(
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


def require_inputs(directory: Path, before: Mapping[str, Any] | None, digests: Mapping[str, str]) -> None:
    """Refuse to go on from other inputs than a run was started with."""
    if before is not None and before["inputs"] != digests:
        changed = sorted(k for k in {*before["inputs"], *digests} if before["inputs"].get(k) != digests.get(k))
        raise InputError(f"{directory}: started from other {', '.join(changed)}; use another --run, or --overwrite")


def _prepare(
    workspace: Workspace,
    config: TrainConfig,
    asked: Mapping[str, Any],
    before: Mapping[str, Any] | None,
    directory: Path,
    group: Processes,
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
    config = resolve(
        config,
        architecture=architecture,
        itc_loss=model.config.itc_loss,
        text_attention=str(model.config.text_attention),
        batches_per_epoch=len(share(inputs.batches_per_epoch, group.rank, group.world)),
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
    # Everything has been checked: only now may what is there be touched.
    group.wait()
    if group.first:
        workspace.stage(f"runs/{directory.name}").start(record, overwrite=overwrite)
    return Training(config, inputs, model.to(group.device), group, directory, record, queries)


@contextmanager
def deterministic(device: torch.device) -> Iterator[None]:
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
def stop_signals(ask: Callable[[], None]) -> Iterator[None]:
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
