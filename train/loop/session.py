"""A run from start to finish: its record, lock, log, checkpoints and evaluations, and how it stops and goes on.

What one method does otherwise than another is its `Learner`.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import torch

from fnpipe.pipeline.errors import InputError
from fnpipe.pipeline.files import atomic
from fnpipe.pipeline.machine.progress import Advance, progress
from fnpipe.pipeline.workspace.record import FORMAT_VERSION
from fnpipe.pipeline.workspace.schemas import TEST
from fnpipe.pipeline.workspace.workspace import Workspace, reading
from fnpipe.train.distributed import World, is_first, processes
from fnpipe.train.evaluation.queries import Queries, read_queries
from fnpipe.train.keys import SessionKeys
from fnpipe.train.loop.learner import Learner, NotFinite, NumberedBatch
from fnpipe.train.loop.resume import asked_values, earlier_record, require_inputs
from fnpipe.train.loop.signals import deterministic, stop_signals
from fnpipe.train.runs.directory import CHECKPOINTS, CONFIG, METRICS, checkpoint_digests, reading_runs, run_directory
from fnpipe.train.runs.log import Log, epoch_line, read_metrics
from fnpipe.train.runs.plots import plot_losses, plot_quantiles
from fnpipe.train.runs.state import STATE, restore, truncate, write_state

K = TypeVar("K", bound=SessionKeys)
OpenLearner = Callable[[Workspace, K, World], Learner[Any, Any]]
Report = Callable[[str], None]
# Called after every optimiser step with its number, counted from 1.
AfterStep = Callable[[int], None]


def see_through(
    workspace: Workspace,
    values: Mapping[str, Any],
    make_config: Callable[..., K],
    open_learner: OpenLearner[K],
    *,
    run: str,
    resume: bool = False,
    overwrite: bool = False,
    report: Report = lambda line: None,
    after_step: AfterStep = lambda step: None,
) -> dict[str, Any]:
    """Train, and leave ``runs/<run>/``; a run that was interrupted goes on, a finished one is left as it is.

    Args:
        values: of the method's config, typed. resume: those not given are as the run was started.
        report: takes a human-readable line after every epoch.

    Returns:
        The summary that also stands in ``config.json`` as ``result``.

    Raises:
        InputError: a value, a file or a stage is at fault; or a loss is no number.
        KeyboardInterrupt: the run was asked to stop (SIGTERM, SIGINT), and has saved its state.
    """
    directory, stage = run_directory(workspace, run), workspace.stage(f"runs/{run}")
    # Of all processes the one that writes holds the run against a second training in it.
    with stage.alone() if is_first() else nullcontext(), ExitStack() as held:
        before = None if overwrite else earlier_record(stage)
        asked = asked_values(directory, before, values, resume)
        if is_first():
            # What is read of the run itself is read before it is overwritten, and held already.
            models = [str(asked[key]) for key in ("init", "agreement") if asked.get(key)]
            others = [model for model in models if model.partition(":")[2] != run]
            held.enter_context(reading_runs(workspace, others, "fnpipe train"))
        if before is not None and before.get("complete"):
            # One that was killed behind its last step has left its locks; they go with this.
            with reading(workspace, before["inputs"], "fnpipe train") if is_first() else nullcontext():
                return before["result"]
        # What a run was begun with stays; the rule by which this was chosen may be another one today.
        begun = {} if before is None else {"evaluate_on": before["config"]["evaluate_on"]}
        config = make_config(**{**asked, **begun})
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        with processes(config.device) as world, deterministic(world.device):
            learner = open_learner(workspace, config, world)
            queries = _check(workspace, learner, directory, before)
            record = _record(learner, asked)
            # Everything has been checked: only now may what is there be touched.
            world.wait()
            if world.first:
                stage.start(record, overwrite=overwrite)
                held.enter_context(reading(workspace, learner.digests, "fnpipe train"))
            session = Session(learner, directory, record, queries, report, after_step)
            with closing(session), stop_signals(session.ask_to_stop):
                return session.run()


def _check(
    workspace: Workspace, learner: Learner[Any, Any], directory: Path, before: Mapping[str, Any] | None
) -> Queries | None:
    """Refuse what a run was not begun with; what is evaluated while it goes."""
    require_inputs(directory, before, learner.digests)
    world = learner.world.world
    if before is not None and before["data"]["processes"] != world:
        raise InputError(f"{directory}: started with {before['data']['processes']} processes, now {world}")
    keys = learner.keys
    if keys.evaluated_on is None:
        return None
    return read_queries(workspace, keys.evaluated_on, keys.evaluate_images, keys.seed)


def _record(learner: Learner[Any, Any], asked: Mapping[str, Any]) -> dict[str, Any]:
    """``config.json`` of a run that begins."""
    return {
        "format": FORMAT_VERSION,
        "complete": False,
        "config": dataclasses.asdict(learner.keys),  # type: ignore[call-overload]
        "asked": dict(asked),
        "inputs": dict(learner.digests),
        **learner.about,
        "torch": torch.__version__,
        **({"notes": list(learner.notes)} if learner.notes else {}),
    }


class Session:
    """A run in work."""

    def __init__(
        self,
        learner: Learner[Any, Any],
        directory: Path,
        record: dict[str, Any],
        queries: Queries | None,
        report: Report,
        after_step: AfterStep,
    ) -> None:
        self.learner, self.world, self.keys = learner, learner.world, learner.keys
        self.directory, self.record, self.queries = directory, record, queries
        self.report, self.after_step, self.stopping = report, after_step, False
        self.position = restore(directory, self.world.device, learner.load_state_dict)
        # So that a process that starts a moment later does not read a state that is newer than the others'.
        self.world.wait()
        if self.world.first:
            truncate(directory / METRICS, self.position.log_bytes)
        # The process that has it is the one that writes.
        self.log = Log(directory, self.keys.tensorboard, self.position.step) if self.world.first else None

    def ask_to_stop(self) -> None:
        """Stop after the step in work."""
        self.stopping = True

    def close(self) -> None:
        if self.log is not None:
            self.log.close()

    def run(self) -> dict[str, Any]:
        """All epochs that are left; the summary."""
        start = time.monotonic()
        left = self.learner.steps - self.position.step
        bar = progress(f"training {self.directory.name}", left, "steps")
        with bar if self.world.first else nullcontext(lambda n: None) as advance:
            while self.position.epoch < self.learner.epochs:
                self._epoch(advance)
        return self._finish(time.monotonic() - start)

    def _epoch(self, advance: Advance) -> None:
        """The rest of the epoch in work, its evaluation, and its checkpoint."""
        epoch = self.position.epoch
        with closing(self.learner.batches(epoch, self.position.batches)) as batches:  # type: ignore[type-var]
            while True:
                start = time.monotonic()
                some = list(itertools.islice(batches, self.learner.accumulate))
                if not some:
                    break
                waited = time.monotonic() - start
                values = self._step(some)
                self._count(some, values, waited, time.monotonic() - start)
                advance(1)
                self.after_step(self.position.step)
                self._stop_or_save()
        self.position.epoch, self.position.batches = epoch + 1, 0
        self._end_epoch(epoch)
        self._save()

    def _step(self, batches: Sequence[NumberedBatch]) -> dict[str, float]:
        try:
            return self.learner.step(batches, self.position)
        except NotFinite as error:
            self._save()
            raise InputError(f"{self.directory}: {error}") from None

    def _count(self, batches: Sequence[NumberedBatch], values: dict[str, float], waited: float, took: float) -> None:
        """Move on by the batches just done, and log them."""
        images = sum(map(len, batches)) * self.world.world
        self.position.batches += len(batches)
        self.position.step += 1
        self.position.seen += images
        if self.log is not None:
            line = {"epoch": self.position.epoch, "batch": batches[0].number, **values, "images_per_s": images / took}
            if self.learner.decodes:
                line["wait_share"] = waited / took
            self.log.write("step", self.position.step, line)

    def _stop_or_save(self) -> None:
        """Stop where a signal asked for it, in any process; else save every ``checkpoint_steps``.

        Raises:
            KeyboardInterrupt: the run stops; its state is saved.
        """
        if self.world.any(self.stopping):
            self._save()
            raise KeyboardInterrupt
        if self.position.step % self.keys.checkpoint_steps == 0:
            self._save()

    def _save(self) -> None:
        """Write ``last.state``, from which the run goes on, and ``last.safetensors``, for use.

        The state holds the weights as well: two files cannot be replaced in one step, and a run that was killed between
        the two would otherwise go on with the weights of one moment and the optimiser of another.
        """
        if self.log is None:
            return
        self.position.log_bytes = self.log.length()
        # The state last: a run that is killed between the two goes on from the one before, and writes both again. The
        # other way about, one that was killed behind its last step would keep the weights of an earlier one.
        self._save_weights("last")
        state = {"position": dataclasses.asdict(self.position), **self.learner.state_dict()}
        write_state(self.directory / CHECKPOINTS / STATE, state)

    def _save_weights(self, name: str) -> None:
        self.learner.save(self.directory / CHECKPOINTS / f"{name}.safetensors")

    def _end_epoch(self, epoch: int) -> None:
        """Evaluate where it is time to, keep the best weights, and say how it goes."""
        keys, last = self.keys, epoch + 1 == self.learner.epochs
        if self.log is not None:
            due = last or (keys.evaluate_every and (epoch + 1) % keys.evaluate_every == 0)
            figures = self._evaluate(epoch, self.queries, self.log) if self.queries is not None and due else {}
            if keys.keep_every and (epoch + 1) % keys.keep_every == 0:
                self._save_weights(f"epoch-{epoch:03d}")
            self.log.length()
            names = (*self.learner.losses, "coverage", "q", "reward")
            self.report(epoch_line(self.directory, epoch, self.learner.epochs, names, figures))
        self.world.wait()

    def _evaluate(self, epoch: int, queries: Queries, log: Log) -> dict[str, float]:
        """Evaluate, log, and keep the weights if they are the best so far; the figures that decide which are."""
        self.learner.product.eval()
        found = self.learner.evaluate(queries)
        self.learner.product.train()
        flat = {f"{name}_{key}": value for name, values in found.items() for key, value in values.items()}
        log.write("evaluation", self.position.step, {"epoch": epoch, **flat})
        deciding = found.get("itm", found["dual"])
        score = deciding.get("map_at_r", deciding["rsum"])
        # Weights are never chosen by the test split: what is reported on it would be too good.
        if queries.on != TEST and (self.position.best is None or score > self.position.best):
            self.position.best = score
            self._save_weights("best")
        return deciding

    def _finish(self, seconds: float) -> dict[str, Any]:
        """Mark the run as complete; its summary."""
        result: dict[str, Any] = {
            "run": self.directory.name,
            "method": self.keys.method,
            "model": self.learner.name,
            "epochs": self.learner.epochs,
            "steps": self.position.step,
            "images_seen": self.position.seen,
            "seconds": round(seconds, 1),
        }
        if self.log is not None:
            self.log.length()
            result |= self._outcome()
            done = {"complete": True, "outputs": checkpoint_digests(self.directory), "result": result}
            atomic.write_json(self.directory / CONFIG, {**self.record, **done})
        self.world.wait()
        return result

    def _outcome(self) -> dict[str, Any]:
        """What the log of a run that is over says, also drawn."""
        steps, evaluations = read_metrics(self.directory, "step"), read_metrics(self.directory, "evaluation")
        last, losses = steps[-1], list(self.learner.losses)
        found: dict[str, Any] = {}
        if self.learner.decodes:
            found["unreadable"] = sum(line.get("unreadable", 0) for line in steps)
        found["losses"] = {key: last[key] for key in losses}
        found["evaluation"] = {k: v for k, v in evaluations[-1].items() if k != "kind"} if evaluations else None
        if "notes" in self.record:
            found["notes"] = self.record["notes"]
        plot_losses(self.directory, losses)
        if "q" in last:
            found["quantiles"] = {key: last[key] for key in ("q", "u", "reward") if key in last}
            plot_quantiles(self.directory)
        return found
