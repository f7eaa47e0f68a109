"""``fnpipe report``: what runs were told, what they logged, and where they differ; `report_page` makes a page of it.

Runs of every method are read alike: each number in a line of ``metrics.jsonl`` is a point of the series of its name.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fnpipe.pipeline.errors import InputError, nearest
from fnpipe.pipeline.workspace.manifest import MANIFEST
from fnpipe.pipeline.workspace.record import read_object
from fnpipe.train.runs.directory import CONFIG, EVALUATION, METRICS, read_run_config
from fnpipe.train.runs.log import read_lines

# What places a line in the run, and is no measure of it.
_PLACES = frozenset({"kind", "step", "epoch", "batch"})
# Points of a curve: each is the mean over an equal stretch of its run.
POINTS = 60
# The parts of config.json in which runs may differ; the rest is what came out.
_PARTS = ("config", "data", "model", "source", "inputs", "torch")
# What two evaluations must share before their figures can be held against each other.
_SAME_QUESTION = ("config.evaluate_on", "config.evaluate_images", "inputs.truth", "inputs.pairs")


@dataclass(frozen=True)
class Series:
    """One measure of a run: (n,) float64 each, in the order of the log; ``step`` and ``epoch`` count from 0 and 1."""

    step: np.ndarray
    epoch: np.ndarray
    value: np.ndarray


@dataclass(frozen=True)
class Run:
    """A run as it lies on disk.

    Attributes:
        name: unique in the report. record: ``config.json``.
        steps, evaluations: by the name of the measure.
    """

    name: str
    path: str
    record: Mapping[str, Any]
    steps: Mapping[str, Series]
    evaluations: Mapping[str, Series]

    @property
    def config(self) -> Mapping[str, Any]:
        return self.record["config"]

    @property
    def complete(self) -> bool:
        return bool(self.record.get("complete"))

    @property
    def result(self) -> Mapping[str, Any]:
        return self.record.get("result") or {}

    @property
    def images_per_step(self) -> int | None:
        """Images of a full step over all processes, if the run says."""
        size = self.config.get("batch_size")
        if not isinstance(size, int):
            return None
        return size * int(self.config.get("accumulate") or 1) * int(self.record.get("data", {}).get("processes") or 1)

    @property
    def last_step(self) -> int:
        return max((int(s.step[-1]) for s in self.steps.values()), default=0)

    @property
    def last_epoch(self) -> int:
        """The epoch of the last step, counted from 1."""
        return max((int(s.epoch[-1]) for s in self.steps.values()), default=0)

    @property
    def step_seconds(self) -> float | None:
        """What the steps took together, over all starts of the run, without evaluations; about, if a batch is short."""
        rate = self.steps.get("images_per_s")
        if rate is None or self.images_per_step is None:
            return None
        return float((self.images_per_step / rate.value[rate.value > 0]).sum())

    @property
    def median_rate(self) -> float | None:
        rate = self.steps.get("images_per_s")
        return None if rate is None else float(np.median(rate.value))


@dataclass(frozen=True)
class Report:
    """Runs side by side.

    Attributes:
        differences: the keys of ``config.json`` in which the runs differ, each with every run's value (`MISSING` where
            a run has no such key). incomparable: those of them that forbid to compare figures.
    """

    runs: list[Run]
    differences: dict[str, list[Any]] = field(default_factory=dict)
    incomparable: list[str] = field(default_factory=list)


MISSING = "(none)"


def read_report(paths: Sequence[str | Path]) -> Report:
    """Read the runs that ``paths`` name: directories of runs, or workspaces, which stand for all their runs.

    Raises:
        InputError: a path is neither, or a run is damaged.
    """
    directories = [directory for path in paths for directory in _run_directories(Path(path))]
    # A run that was named twice stands once.
    directories = list({directory.resolve(): directory for directory in directories}.values())
    runs = [read_run(directory, name) for directory, name in zip(directories, _names(directories), strict=True)]
    differences = find_differences([run.record for run in runs])
    return Report(runs, differences, [key for key in _SAME_QUESTION if key in differences])


def _run_directories(path: Path) -> list[Path]:
    if (path / CONFIG).is_file():
        return [path]
    if (path / MANIFEST).is_file():
        found = sorted(child for child in (path / "runs").glob("[!.]*") if (child / CONFIG).is_file())
        if not found:
            raise InputError(f"{path}: a workspace without runs; train one with `fnpipe train {path}`")
        return found
    if not path.exists():
        siblings = sorted(child.parent.name for child in path.parent.glob(f"[!.]*/{CONFIG}"))
        raise InputError(
            f"{path}: no such run{nearest(path.name, siblings)}; give directories like WORKSPACE/runs/NAME"
        )
    raise InputError(f"{path}: no run (it holds no {CONFIG}); give directories like WORKSPACE/runs/NAME")


def _names(directories: Sequence[Path]) -> list[str]:
    """A name for every run: that of its directory; runs of equal names get those of their workspaces before it."""
    whole = [directory.resolve() for directory in directories]
    names = [path.name for path in whole]
    longer = [f"{path.parent.parent.name}/{path.name}" for path in whole]
    mixed = [more if names.count(name) > 1 else name for name, more in zip(names, longer, strict=True)]
    return [str(path) if mixed.count(name) > 1 else name for name, path in zip(mixed, whole, strict=True)]


def read_run(directory: Path, name: str) -> Run:
    """A run from its directory; one that has not made a step yet has no series.

    Raises:
        InputError: its files are damaged.
    """
    record = read_run_config(directory)
    if not isinstance(record.get("config"), dict):
        raise InputError(f"{directory / CONFIG}: damaged (no 'config'); train again with --overwrite")
    kinds = _read_series(directory / METRICS, whole=bool(record.get("complete")))
    return Run(name, str(directory), record, kinds.get("step", {}), kinds.get("evaluation", {}))


def _read_series(path: Path, whole: bool) -> dict[str, dict[str, Series]]:
    """Series by the kind of line and the name of the number.

    Args:
        whole: the run is finished, so that a line cut short is damage and not the last one of a killed run.
    """
    columns: dict[tuple[str, str], tuple[array[float], array[float], array[float]]] = {}
    for line in read_lines(path, whole):
        place = float(line.get("step", 0)), float(line.get("epoch", -1)) + 1
        for name, value in line.items():
            if name in _PLACES or isinstance(value, bool) or not isinstance(value, int | float):
                continue
            if math.isfinite(value):
                series = columns.setdefault((line["kind"], name), (array("d"), array("d"), array("d")))
                for column, number in zip(series, (*place, float(value)), strict=True):
                    column.append(number)
    kinds: dict[str, dict[str, Series]] = {}
    for (kind, name), series in columns.items():
        kinds.setdefault(kind, {})[name] = Series(*(np.array(column) for column in series))
    return kinds


def find_differences(records: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """The keys whose values differ between records, such as ``config.lr``, each with all values."""
    flat = [dict(_flatten({part: record[part] for part in _PARTS if part in record})) for record in records]
    keys = list(dict.fromkeys(key for one in flat for key in one))
    values = {key: [one.get(key, MISSING) for one in flat] for key in keys}
    return {key: found for key, found in values.items() if any(value != found[0] for value in found[1:])}


def split_differences(differences: Mapping[str, list[Any]]) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
    """Those of keys that all runs have, and those of keys that some do not know, such as another method's."""
    of_all = {key: values for key, values in differences.items() if MISSING not in values}
    return of_all, {key: values for key, values in differences.items() if key not in of_all}


def _flatten(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _flatten(inner, f"{key}.{name}" if key else str(name))
    else:
        yield key, value


def thinned(series: Series, points: int = POINTS) -> tuple[np.ndarray, np.ndarray]:
    """Means over equal stretches of the run up to the last step: (m,) steps, m <= points, and (m,) values."""
    end = max(float(series.step[-1]), 1.0)
    cell = np.minimum(((series.step - 1).clip(0) / end * points).astype(np.int64), points - 1)
    cells, inverse = np.unique(cell, return_inverse=True)
    counts = np.bincount(inverse)
    steps = np.bincount(inverse, series.step) / counts
    return steps, np.bincount(inverse, series.value, len(cells)) / counts


def end_value(series: Series) -> float:
    """The mean over the last twentieth of the steps that a measure was logged at."""
    return float(series.value[-max(1, len(series.value) // 20) :].mean())


def summarise(report: Report) -> dict[str, Any]:
    """The report as JSON: what ``--json`` prints."""
    return {
        "runs": [_summary_of(run) for run in report.runs],
        "differences": report.differences,
        "incomparable": report.incomparable,
    }


def _summary_of(run: Run) -> dict[str, Any]:
    config = run.config
    return {
        "run": run.name,
        "path": run.path,
        "method": config.get("method"),
        "model": config.get("model") or config.get("embeddings"),
        "complete": run.complete,
        "epochs": config.get("epochs"),
        "last_epoch": run.last_epoch,
        "steps": run.last_step,
        "seconds": run.result.get("seconds"),
        "step_seconds": None if run.step_seconds is None else round(run.step_seconds, 1),
        "images_per_s": None if run.median_rate is None else round(run.median_rate, 1),
        "end": {name: end_value(series) for name, series in run.steps.items()},
        "evaluated_on": config.get("evaluate_on"),
        "evaluated_epoch": max((int(s.epoch[-1]) for s in run.evaluations.values()), default=None),
        "evaluation": {name: float(series.value[-1]) for name, series in run.evaluations.items()} or _kept(run),
    }


def _kept(run: Run) -> dict[str, float]:
    """What ``fnpipe evaluate`` found last of a run that was not evaluated while it trained."""
    kept = read_object(Path(run.path) / EVALUATION) or {}
    found = list(kept.values())[-1] if kept else {}
    lists = {name: found[name] for name in ("dual", "itm") if isinstance(found.get(name), dict)}
    return {f"{name}_{key}": float(value) for name, figures in lists.items() for key, value in figures.items()}
