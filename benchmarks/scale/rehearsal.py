"""What the whole chain takes on 10,000, 30,000 and 100,000 drawn scenes, stage by stage, and how it grows.

    python benchmarks/scale/rehearsal.py --root DIR [--scenes 500 10000 30000 100000]

Every stage is one command of `fnpipe` in a process of its own. Wall seconds, CPU seconds, the peak memory of its whole
process tree (anonymous, and beside it mapped files) and the bytes it leaves are kept in DIR/<scenes>/rehearsal.json; a
stage that stands there is not run again, so that a rehearsal can be stopped at any time. The smallest size stands for
what a stage takes to start: growth is that of the CPU seconds beyond it. Linux only. The output is Markdown; its last
line is JSON.

Measured: see docs/performance/rehearsal.md; outlook.py carries the figures on to 4 and 400 million pairs.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

SCENES = (500, 10_000, 30_000, 100_000)
HOLDOUT = 1000
BATCH, SEARCH_SPACE, CANDIDATES = 64, 1920, 8
SEED = 1
# Worse than this grows worse than linear; what lies below may be noise of a busy machine.
LINEAR = 1.15
SAMPLE_SECONDS = 0.25
RESULTS = "rehearsal.json"
_ADOPT_ORPHANS = 36  # PR_SET_CHILD_SUBREAPER of prctl


@dataclass(frozen=True)
class Usage:
    """What a command took: memory in MiB, each part at its own peak, summed over the processes of its tree.

    A page that several processes share counts once (the proportional shares of ``smaps_rollup``).
    """

    wall_seconds: float
    cpu_seconds: float
    anonymous_mib: float
    mapped_mib: float


@dataclass(frozen=True)
class Stage:
    """One command of the chain.

    Attributes:
        arguments: of ``fnpipe``; of this script's own, where they begin with ``--draw``.
        makes: what it leaves, relative to the directory of its size; removed before it starts.
        facts: the fields of its JSON summary that are kept.
    """

    name: str
    arguments: tuple[str, ...]
    makes: tuple[str, ...] = ()
    facts: tuple[str, ...] = ()


@dataclass
class Rehearsal:
    """The stages of one size: name -> usage, bytes and facts, in the order of the chain."""

    scenes: int
    stages: dict[str, dict[str, Any]] = field(default_factory=dict)


def chain(scenes: int, candidates: int = CANDIDATES) -> list[Stage]:
    """The stages in order, as one types them in the directory of this size."""
    plan = f"grit-{SEARCH_SPACE}"
    mine = ("mine-connections", "work", "--discriminator", "itm:demo", "--groups", plan, "--threads", "1", "--json")
    group = ("group", "work", "--batch-size", str(BATCH), "--search-space")
    train = ("train", "work", "--method", "mafa", "--run", "mafa", "--init", "demo", "--groups", plan, "--edges", "itm")
    return [
        Stage("draw", ("--draw", "scenes", str(scenes)), ("scenes",), ("true",)),
        Stage(
            "shard",
            ("shard", "scenes/pairs.json", "work", "--holdout", str(min(HOLDOUT, scenes // 10)), "--json"),
            ("work",),
            ("rows", "kept", "quarantined", "images", "pairs", "shards", "splits"),
        ),
        Stage(
            "embed",
            ("embed", "work", "--model", "demo", "--name", "demo", "--threads", "1", "--json"),
            ("work/embeddings",),
            ("images", "pairs", "width", "bad"),
        ),
        Stage("build-graph", ("build-graph", "work", "--json"), ("work/graph",), ("index", "k", "recall")),
        Stage(
            f"group, M = {SEARCH_SPACE:,}",
            (*group, str(SEARCH_SPACE), "--json"),
            (f"work/groups/{plan}",),
            ("batches", "batch_size", "planned", "dropped", "images"),
        ),
        Stage(
            "group, M = all",
            (*group, "all", "--json"),
            ("work/groups/grit-all",),
            ("batches", "planned", "dropped", "images", "steps"),
        ),
        Stage(
            "mine-connections --plan",
            (*mine, "--candidates", str(CANDIDATES), "--plan"),
            (),
            ("unique_combinations", "judgements", "identity", "images", "combinations_per_second", "seconds"),
        ),
        Stage(
            "mine-connections",
            (*mine, "--candidates", str(candidates)),
            ("work/edges",),
            ("unique_combinations", "judgements", "identity", "undecodable", "labels"),
        ),
        Stage(
            "train, one epoch",
            (*train, "--epochs", "1", "--threads", "1", "--set", "evaluate_every=0", "--json"),
            ("work/runs",),
            ("steps", "seconds"),
        ),
        Stage("evaluate", ("evaluate", "work", "--run", "mafa", "--json"), (), ("images", "captions")),
        Stage(
            "inspect --html",
            ("inspect", "work", "--label", "positive", "--html", "report.html", "--json"),
            ("report.html",),
            ("matching", "labels"),
        ),
        Stage(
            "export",
            ("export", "work", "exported", "--to", "open_clip", "--json"),
            ("exported",),
            ("images", "recorded", "mined"),
        ),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenes", type=int, nargs="+", default=SCENES, help="ascending; the smallest is the start-up")
    parser.add_argument("--root", type=Path, help="where the workspaces lie; half a gigabyte at 100,000 scenes")
    parser.add_argument("--mine-seconds", type=float, default=480, help="fewer candidates where judging takes longer")
    parser.add_argument("--draw", nargs=2, metavar=("DIR", "SCENES"), help="draw scenes, and nothing else")
    chosen = parser.parse_args()
    if chosen.draw:
        draw(Path(chosen.draw[0]), int(chosen.draw[1]))
        return
    if chosen.root is None:
        parser.error("--root is missing")
    rehearsals = [rehearse(chosen.root, scenes, chosen.mine_seconds) for scenes in sorted(chosen.scenes)]
    print(report(rehearsals))
    print(json.dumps({"cpus": os.cpu_count(), "rehearsals": [asdict(one) for one in rehearsals]}))


def draw(directory: Path, scenes: int) -> None:
    """Draw scenes; the last line says how many combinations are true beside the recorded ones."""
    import pyarrow.parquet as pq

    from fnpipe.pipeline.scenes.dataset import write_scenes

    write_scenes(directory, scenes, SEED)
    print(json.dumps({"true": pq.read_metadata(directory / "truth.parquet").num_rows - scenes}))


def rehearse(root: Path, scenes: int, mine_seconds: float) -> Rehearsal:
    """Run the stages of one size that have not been measured yet."""
    directory = root / str(scenes)
    directory.mkdir(parents=True, exist_ok=True)
    found = directory / RESULTS
    rehearsal = Rehearsal(scenes, json.loads(found.read_text()) if found.exists() else {})
    for name in [stage.name for stage in chain(scenes)]:
        if name in rehearsal.stages:
            continue
        # How many candidates are affordable is known once the plan has said how long they take.
        plan = rehearsal.stages.get("mine-connections --plan", {}).get("facts", {})
        candidates = affordable(plan.get("seconds") or 0.0, mine_seconds)
        stage = next(stage for stage in chain(scenes, candidates) if stage.name == name)
        rehearsal.stages[name] = run(stage, directory)
        if name == "mine-connections":
            rehearsal.stages[name]["facts"]["candidates"] = candidates
        temporary = found.with_suffix(".tmp")
        temporary.write_text(json.dumps(rehearsal.stages, indent=1))
        temporary.replace(found)
    return rehearsal


def affordable(seconds: float, limit: float) -> int:
    """The candidates for which judging stays below ``limit`` seconds, if all of them take ``seconds``."""
    return CANDIDATES if seconds <= limit else max(1, int(CANDIDATES * limit / seconds))


def run(stage: Stage, directory: Path) -> dict[str, Any]:
    """Run one stage from scratch."""
    for path in (directory / name for name in stage.makes):
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
    program = [os.path.abspath(__file__)] if stage.arguments[0] == "--draw" else ["-m", "fnpipe.cli"]
    usage, output = measure([sys.executable, *program, *stage.arguments], directory)
    said = json.loads(output.splitlines()[-1])
    print(f"{directory.name} {stage.name}: {usage}", file=sys.stderr, flush=True)
    return {
        **{name: round(value, 2) for name, value in asdict(usage).items()},
        "bytes": sum(size_of(directory / name) for name in stage.makes),
        "facts": {name: said[name] for name in stage.facts},
    }


def measure(command: Sequence[str], directory: Path) -> tuple[Usage, str]:
    """Run a command in ``directory`` to its end, and its descendants' as well.

    Returns:
        What it took, and its standard output.

    Raises:
        RuntimeError: it failed.
    """
    # Orphans, such as the server that workers are forked from, come to us, so that their CPU seconds are counted.
    ctypes.CDLL(None).prctl(_ADOPT_ORPHANS, 1, 0, 0, 0)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    log = directory / "stderr.log"
    processes, anonymous, mapped = Descendants(), 0.0, 0.0
    began = time.perf_counter()
    with (directory / "stdout.log").open("w+") as out, log.open("a") as errors:
        process = subprocess.Popen(command, cwd=directory, stdout=out, stderr=errors)
        while process.poll() is None:
            now = memory(processes.alive())
            anonymous, mapped = max(anonymous, now[0]), max(mapped, now[1])
            time.sleep(SAMPLE_SECONDS)
        wall = time.perf_counter() - began
        reap_orphans()
        out.seek(0)
        output = out.read()
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}; see {log}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Usage(wall, cpu, anonymous, mapped), output


class Descendants:
    """The processes below this one; each process of the machine is looked at once."""

    def __init__(self) -> None:
        self._parents: dict[int, int] = {}

    def alive(self) -> list[int]:
        there = {int(name) for name in os.listdir("/proc") if name.isdecimal()}
        self._parents = {process: parent for process, parent in self._parents.items() if process in there}
        for process in there - self._parents.keys():
            try:
                # The name in brackets may hold anything; the parent is the second field after it.
                stat = Path(f"/proc/{process}/stat").read_text()
            except OSError:
                continue  # it has just ended
            self._parents[process] = int(stat.rpartition(")")[2].split()[1])
        return [process for process in there if self._is_below(process)]

    def _is_below(self, process: int) -> bool:
        while process in self._parents:
            process = self._parents[process]
            if process == os.getpid():
                return True
        return False


def memory(processes: Iterable[int]) -> tuple[float, float]:
    """MiB of anonymous memory, and of mapped files and shared memory, of some processes together."""
    anonymous = mapped = 0
    for process in processes:
        try:
            lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()[1:]
        except OSError:
            continue
        kib = {line.split(":")[0]: int(line.split()[1]) for line in lines}
        anonymous += kib.get("Pss_Anon", 0)
        mapped += kib.get("Pss_File", 0) + kib.get("Pss_Shmem", 0)
    return anonymous / 1024, mapped / 1024


def reap_orphans(patience_seconds: float = 20.0) -> None:
    """Wait for adopted processes, which end a moment after the command that started them."""
    until = time.monotonic() + patience_seconds
    with suppress(ChildProcessError):  # none is left
        while time.monotonic() < until:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(0.02)


def size_of(path: Path) -> int:
    """Bytes of a file, or of all files below a directory."""
    return path.stat().st_size if path.is_file() else sum(p.stat().st_size for p in path.rglob("*") if p.is_file())


# From measurements to tables.


def exponent(sizes: Sequence[float], values: Sequence[float], start: float) -> float | None:
    """The x of ``values - start ~ sizes ** x``, by least squares of logarithms; None where nothing grows.

    Args:
        start: what is taken at a size of nearly nothing.
    """
    beyond = np.array(values) - start
    if len(sizes) < 2 or (beyond <= 0).any():
        return None
    return float(np.polyfit(np.log(sizes), np.log(beyond), 1)[0])


def growth(rehearsals: Sequence[Rehearsal], stage: str, value: str = "cpu_seconds") -> float | None:
    """`exponent` of a stage over all sizes but the smallest, which stands for its start.

    None where the largest takes less than twice the start: a difference that small is the machine's.
    """
    start, *others = (float(one.stages[stage][value]) for one in rehearsals)
    if others and others[-1] < 2 * start:
        return None
    return exponent([one.scenes for one in rehearsals[1:]], others, start)


def slope(rehearsals: Sequence[Rehearsal], stage: str, value: str) -> float:
    """What one more scene takes, between the two largest sizes."""
    one, other = rehearsals[-2:]
    return float(other.stages[stage][value] - one.stages[stage][value]) / (other.scenes - one.scenes)


def report(rehearsals: Sequence[Rehearsal]) -> str:
    """The Markdown tables: time and its growth, memory and disk, and what was judged and trained."""
    return "\n\n".join((_time_table(rehearsals), _size_table(rehearsals), _fact_table(rehearsals)))


def table(rows: Iterable[Sequence[str]]) -> str:
    """Rows of cells as a Markdown table; the first is its head."""
    head, *body = ("| " + " | ".join(row) + " |" for row in rows)
    rule = "| " + " | ".join(["---"] * (head.count("|") - 1)) + " |"
    return "\n".join([head, rule, *body])


def _time_table(rehearsals: Sequence[Rehearsal]) -> str:
    rows = [["wall / CPU seconds", *(f"{one.scenes:,}" for one in rehearsals), "exponent"]]
    for stage in rehearsals[0].stages:
        found = growth(rehearsals, stage)
        shown = "-" if found is None else f"{found:.2f}" + (" **worse than linear**" if found > LINEAR else "")
        taken = [(one.stages[stage]["wall_seconds"], one.stages[stage]["cpu_seconds"]) for one in rehearsals]
        rows.append([stage, *(f"{wall:.1f} / {cpu:.1f}" for wall, cpu in taken), shown])
    sums = [
        [sum(stage[value] for stage in one.stages.values()) for value in ("wall_seconds", "cpu_seconds")]
        for one in rehearsals
    ]
    return table([*rows, ["all", *(f"{wall:.0f} / {cpu:.0f}" for wall, cpu in sums), ""]])


def _size_table(rehearsals: Sequence[Rehearsal]) -> str:
    rows = [
        [
            "peak MiB, anonymous + mapped",
            *(f"{one.scenes:,}" for one in rehearsals),
            "KiB more a scene",
            "MB on disk",
            "bytes a scene",
        ]
    ]
    for stage, largest in rehearsals[-1].stages.items():
        taken = [(one.stages[stage]["anonymous_mib"], one.stages[stage]["mapped_mib"]) for one in rehearsals]
        more = slope(rehearsals, stage, "anonymous_mib") * 1024 if len(rehearsals) > 1 else float("nan")
        left = largest["bytes"]
        rows.append(
            [
                stage,
                *(f"{anonymous:,.0f} + {mapped:,.0f}" for anonymous, mapped in taken),
                f"{more:.2f}",
                f"{left / 1e6:,.1f}" if left else "-",
                f"{left / rehearsals[-1].scenes:,.0f}" if left else "-",
            ]
        )
    return table(rows)


def _fact_table(rehearsals: Sequence[Rehearsal]) -> str:
    """What the stages say of themselves, one line each."""

    def line(name: str, form: str, value: Any) -> list[str]:
        return [name, *(format(value(one.stages), form) for one in rehearsals)]

    def facts(stages: Mapping[str, Any], stage: str) -> Mapping[str, Any]:
        found: Mapping[str, Any] = stages[stage]["facts"]
        return found

    plan, mine, train = "mine-connections --plan", "mine-connections", "train, one epoch"
    return table(
        [
            ["", *(f"{one.scenes:,}" for one in rehearsals)],
            line("true combinations beside the recorded", ",", lambda s: facts(s, "draw")["true"]),
            line("candidates an anchor and direction", "", lambda s: facts(s, mine)["candidates"]),
            line("judgements", ",", lambda s: facts(s, mine)["judgements"]),
            line("judgements a planned image", ".2f", judgements_an_image),
            line("judging by --plan, seconds", ".0f", lambda s: facts(s, plan)["seconds"]),
            line("judging in truth, wall seconds", ".0f", lambda s: s[mine]["wall_seconds"]),
            line("mined positives", ",", lambda s: facts(s, mine)["labels"]["positive"]),
            line("steps", ",", lambda s: facts(s, train)["steps"]),
            ["CPU seconds a step", "", *(f"{seconds_a_step(rehearsals[0], one):.3f}" for one in rehearsals[1:])],
        ]
    )


def seconds_a_step(start: Rehearsal, rehearsal: Rehearsal) -> float:
    """CPU seconds of one step of training, its start-up taken off."""
    ours, theirs = (one.stages["train, one epoch"] for one in (rehearsal, start))
    steps = ours["facts"]["steps"] - theirs["facts"]["steps"]
    return float((ours["cpu_seconds"] - theirs["cpu_seconds"]) / steps)


def judgements_an_image(stages: Mapping[str, Any]) -> float:
    """How many combinations are judged for each image that the plan holds."""
    planned = stages[f"group, M = {SEARCH_SPACE:,}"]["facts"]["planned"]
    return float(stages["mine-connections"]["facts"]["judgements"] / planned)


if __name__ == "__main__":
    main()
