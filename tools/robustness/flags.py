"""Flags that contradict each other, are out of range, empty, repeated, in other scripts, or enormous: every command.

    python tools/robustness/flags.py [--limit N] [--only embed ...]

Each combination runs in a process of its own on a fresh copy of a small workspace that every stage has been through.
A combination is right if it ends with exit code 2 and one line on stderr, or, where the flags may mean something, with
exit code 0 and no traceback. Those that are known to be wrong must be refused: an exit code of 0 is a failure there.
The output ends with a table by command, and one JSON object. Its order is drawn, the same every time, so that what an
interrupted run (Ctrl-C) has tried, and what ``--limit`` leaves, is a sample of all.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import typer

from fnpipe.cli import main as commands  # noqa: F401  registers every command
from fnpipe.cli.main import app, run

SECONDS_PER_COMBINATION = 60
IMAGES = 24
HUGE = "9" * 20
LONG = "x" * 5000
ODD_NAMES = ("\u202etxt", "a/b", "..", ".", "-", "é" * 200, "💥 'x'", "\ud800", "$(id)", "a\x1b[31m", "~")
NOT_NUMBERS = ("x", "1e", "0x10", "١٢", "1,000", "--")
DEVICES = ("meta", "mps", "xla", "cuda:1", "cuda:99", "cuda:-1", "CUDA", "cpu:0", "cuda:" + HUGE)

# A command line of each command that is right; W is the workspace, D a directory that is not there yet.
RIGHT: dict[str, list[str]] = {
    "shard": ["shard", "S/pairs.json", "D", "--workers", "1"],
    "status": ["status", "W"],
    "demo": ["demo", "W/fnpipe.json"],
    "embed": ["embed", "W", "--model", "demo", "--name", "again", "--workers", "0"],
    "build-graph": ["build-graph", "W", "--k", "4"],
    "group": ["group", "W", "--batch-size", "4", "--search-space", "8", "--name", "again"],
    "audit": ["audit", "W", "--batch-size", "4", "--search-space", "8", "--batches", "4"],
    "mine-connections": ["mine-connections", "W", "--discriminator", "clip", "--groups", "grit-8", "--name", "again"],
    "relabel": ["relabel", "W", "--edges", "clip"],
    "prepare": [
        "prepare",
        "W",
        "--discriminator",
        "clip",
        "--batch-size",
        "4",
        "--search-space",
        "8",
        "--recipe",
        "quantile",
    ],
    "inspect": ["inspect", "W", "--edges", "clip"],
    "export": ["export", "W", "D", "--edges", "clip", "--to", "open_clip"],
    "report": ["report", "W/runs/r"],
    "train": ["train", "W", "--method", "itc", "--run", "again", "--epochs", "1", "--set", "batch_size=8"],
    "evaluate": ["evaluate", "W", "--run", "r"],
    "export-model": ["export-model", "W", "D", "--run", "r"],
}

# Flags that cannot stand together, or values that nothing has; added to the command line that is right.
WRONG: dict[str, list[list[str]]] = {
    "shard": [
        ["--in-place", "--resize", "8"],
        ["--in-place", "--shards", "D"],
        ["--verify"],
        ["--no-header"],
        ["--split", "val"],
        ["--format", "png"],
        ["--format", "ALBEF"],
        ["--holdout", "0"],
        ["--holdout", "1.5"],
        ["--holdout", "-1"],
        ["--holdout", "24"],
        ["--shuffle-captions", "0"],
        ["--shuffle-captions", "2"],
        ["--max-pixels", "0"],
        ["--images-per-shard", "0"],
        ["--resize", "0"],
        ["--workers", "0"],
        ["--seed", "-1"],
        ["--in-place"],
        ["--image-root", "nowhere"],
        ["--shards", "nosuchscheme://x"],
    ],
    "status": [["--nope"], ["extra"]],
    "demo": [["extra"]],
    "embed": [
        ["--pretrained", "openai"],
        ["--import", "D"],
        ["--import", "W", "--pretrained", "openai"],
        ["--model", "nope"],
        ["--model", "run:"],
        ["--model", "run:nope"],
        ["--model", "run:.."],
        ["--model", "run:/"],
        ["--model", "run:W/runs/nope"],
        ["--model", "itm:demo"],
        ["--model", "ViT-B-32"],
        ["--model", "ViT-B-32", "--pretrained", "nope"],
        ["--model", "ViT-B-32", "--pretrained", "W"],
        ["--model", "ViT-B-32", "--pretrained", "W/fnpipe.json"],
        ["--model", "local-dir:W"],
        ["--model", "local-dir:"],
        ["--batch-size", "0"],
        ["--threads", "0"],
        ["--workers", "-1"],
        ["--precision", "fp8"],
        ["--precision", "BF16"],
        ["--engine", "dask"],
        ["--engine", "ray", "--device", "cuda:1"],
    ],
    "build-graph": [
        ["--embeddings", "nope"],
        ["--k", "0"],
        ["--k", "4097"],
        ["--k", "-1"],
        ["--index", "hnsw"],
        ["--recall-check", "-1"],
        ["--engine", "dask"],
        ["--k", "5"],
        ["--seed", "-1", "--overwrite"],
    ],
    "group": [
        ["--sampling", "grids"],
        ["--batch-size", "1"],
        ["--batch-size", "0"],
        ["--batch-size", "-4"],
        ["--batch-size", "25"],
        ["--search-space", "0"],
        ["--search-space", "-8"],
        ["--search-space", "9"],
        ["--search-space", "ALL "],
        ["--search-space", HUGE],
        ["--epochs", "0"],
        ["--epochs", "-1"],
        ["--seed", "-1"],
        ["--embeddings", "nope"],
        ["--batch-size", "1000", "--search-space", "1000"],
        ["--materialize", "W/fnpipe.json"],
    ],
    "audit": [
        ["--tau-high", "0.5"],
        ["--discriminator", "clip", "--tau-high", "1.5"],
        ["--discriminator", "nope"],
        ["--discriminator", "itm:"],
        ["--discriminator", "itm:nope"],
        ["--discriminator", "vacsr:r"],
        ["--discriminator", "clip:x"],
        ["--batches", "0"],
        ["--batch-size", "1"],
        ["--search-space", "7"],
        ["--truth", "nope"],
        ["--truth", "W"],
        ["--truth", "S/pairs.json"],
        ["--plot", "plot.pdf"],
        ["--plot", "W"],
        ["--embeddings", "nope"],
        ["--seed", "-1"],
    ],
    "mine-connections": [
        ["--discriminator", "nope"],
        ["--discriminator", "itm"],
        ["--discriminator", "itm:"],
        ["--discriminator", "itm:nope"],
        ["--discriminator", "itm:../.."],
        ["--discriminator", "vacsr:r"],
        ["--discriminator", "vacsr:"],
        ["--discriminator", "blip:"],
        ["--discriminator", "clip:x"],
        ["--discriminator", "a.b:c"],
        ["--candidates", "-1"],
        ["--candidates", "0"],
        ["--candidates", "100000"],
        ["--groups", "nope"],
        ["--groups", "grit-8", "--groups", "nope"],
        ["--graph", "-1"],
        ["--graph", "1000"],
        ["--embeddings", "nope"],
        ["--tau-low", "0.9"],
        ["--tau-high", "0.1"],
        ["--tau-high", "2"],
        ["--tau-low", "-1"],
        ["--positive-share", "0"],
        ["--positive-share", "1"],
        ["--positive-share", "0.1", "--tau-low", "0.2"],
        ["--calibrate-on", "nope"],
        ["--discriminator", "itm:demo", "--calibrate-on", "clip"],
        ["--block-images", "0"],
        ["--workers", "0"],
        ["--threads", "0"],
        ["--engine", "dask"],
        ["--precision", "fp8"],
    ],
    "prepare": [
        ["--recipe", "soft"],
        ["--discriminator", "nope"],
        ["--search-space", "9"],
        ["--search-space", "all"],
        ["--epochs", "0"],
        ["--name", "a/b"],
        ["--embeddings", "nope"],
    ],
    "relabel": [
        ["--edges", "nope"],
        ["--tau-low", "0.9", "--tau-high", "0.1"],
        ["--tau-high", "1.1"],
        ["--positive-share", "0.1", "--tau-high", "0.9"],
        ["--positive-share", "2"],
        ["--positive-share", "0"],
    ],
    "inspect": [
        ["--edges", "nope"],
        ["--label", "true"],
        ["--label", "Positive"],
        ["--source", "clip"],
        ["--limit", "0"],
        ["--limit", "-3"],
        ["--truth", "nope"],
        ["--truth", "W/fnpipe.json"],
        ["--tau-high", "2"],
        ["--tau-low", "0.9", "--tau-high", "0.1"],
        ["--html", "W"],
        ["--html", "nope/page.html"],
        ["--html", "W/fnpipe.json/page.html"],
    ],
    "export": [["--to", "jax"], ["--to", "HF"], ["--edges", "nope"], ["extra"]],
    "report": [["nope"], ["W/fnpipe.json"], ["--html", "W"], ["--html", "nope/page.html"]],
    "train": [
        ["--method", "nope"],
        ["--method", "ITC"],
        ["--run", ".."],
        ["--run", "a/b"],
        ["--run", "r"],
        ["--model", "nope"],
        ["--model", "ViT-B-32", "--init", "nope"],
        ["--init", "nope"],
        ["--init", "run:nope"],
        ["--init", "W/fnpipe.json"],
        ["--init", "W"],
        ["--init", "demo", "--model", "ViT-B-32"],
        ["--groups", "nope"],
        ["--edges", "nope"],
        ["--embeddings", "demo"],
        ["--epochs", "0"],
        ["--epochs", "-1"],
        ["--reward", "itg"],
        ["--reward", "nope"],
        ["--method", "falcon", "--groups", "grit-8"],
        ["--method", "mafa", "--set", "agreement=nope"],
        ["--method", "adapter", "--set", "augment=none"],
        ["--method", "adapter", "--embeddings", "nope"],
        ["--method", "vacsr", "--set", "hidden=0"],
        ["--truth", "nope"],
        ["--threads", "0"],
        ["--threads", "5000"],
        ["--config", "nope"],
        ["--config", "W"],
        ["--config", "S/pictures/0000.png"],
        ["--set", "batch_size=9"],
        ["--set", "nope=1"],
        ["--set", "lr"],
        ["--set", "=1"],
        ["--set", "lr=[1]"],
        ["--set", "lr=nan"],
        ["--set", "lr=-1"],
        ["--set", "lr=1", "--set", "lr=2"],
        ["--set", "epochs=2"],
        ["--set", "seed=-1"],
        ["--set", f"seed={HUGE}"],
        ["--set", f"threads={HUGE}"],
        ["--set", f"workers={HUGE}"],
        ["--set", f"accumulate={HUGE}"],
        ["--set", "device=meta"],
        ["--set", "device=mps"],
        ["--set", "device=cuda:99"],
        ["--set", "precision=fp8"],
        ["--set", "augment=nope"],
        ["--set", "image_size=65"],
        ["--set", "evaluate_on=nope"],
        ["--set", "ema_decay=1.5"],
        ["--set", "lr: {"],
        ["--set", 'truth="a\\0b"'],
        ["--resume", "--overwrite"],
        ["--resume"],
    ],
    "evaluate": [
        ["--run", "nope"],
        ["--run", "a/b"],
        ["--embeddings", "nope"],
        ["--embeddings", "demo"],
        ["--checkpoint", "nope"],
        ["--checkpoint", "../last"],
        ["--on", "nope"],
        ["--truth", "nope"],
        ["--eccv", "--on", "train"],
        ["--eccv", "--truth", "nope"],
        ["--coco-captions", "nope"],
        ["--top-k", "0"],
    ],
    "export-model": [
        ["--run", "nope"],
        ["--run", ".."],
        ["--checkpoint", "nope"],
        ["--checkpoint", "../../x"],
        ["extra"],
    ],
}

# A flag of one value, twice: the last would win without a word.
TWICE = {
    "shard": ["--seed", "1", "--seed", "2"],
    "embed": ["--batch-size", "7", "--batch-size", "9"],
    "build-graph": ["--k", "9", "--k", "4"],
    "prepare": ["--recipe", "avoid", "--recipe", "quantile"],
    "inspect": ["--limit", "3", "--limit", "4"],
    "export": ["--to", "hf", "--to", "sentence-transformers"],
    "train": ["--epochs", "2", "--epochs", "1"],
    "evaluate": ["--on", "train", "--on", "all"],
    "export-model": ["--checkpoint", "best", "--checkpoint", "last"],
}

# Odd, yet to be understood: a switch may be thrown twice, spaces around a number do no harm.
FINE: dict[str, list[list[str]]] = {
    "shard": [
        ["--images-per-shard", "1000000"],
    ],
    "status": [["--quarantine", "--quarantine"], ["--json"]],
    "embed": [["--precision", "bf16"], ["--name", "日本語"]],
    "build-graph": [["--json", "--json"]],
    "group": [["--sampling", "random", "--search-space", "9"], ["--keep-last"], ["--seed", str(2**63 - 1)]],
    "audit": [["--search-space", "8", "--search-space", "16"], ["--seed", str(2**62)]],
    "mine-connections": [["--plan", "--plan"], ["--groups", "grit-8", "--groups", "grit-8"], ["--name", "naïve"]],
    "prepare": [["--plan", "--plan"], ["--name", "naïve"]],
    "relabel": [["--tau-low", "0", "--tau-high", "1"], ["--positive-share", "0.5"]],
    "inspect": [["--limit", "1000000"], ["--tau-low", "0.5", "--tau-high", "0.5"]],
    "report": [["W/runs/r"], ["W"]],
    "train": [["--set", "lr=1e-4"], ["--set", "seed= 3 "]],
    "evaluate": [["--top-k", "3"]],
}


@dataclass(frozen=True)
class Combination:
    """A command line. refused: it is wrong, so that an exit code of 0 is a failure."""

    words: tuple[str, ...]
    refused: bool | None


def combinations() -> Iterator[Combination]:
    """All of them, the same ones every time."""
    known: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    for name, right in RIGHT.items():
        for words in WRONG.get(name, []):
            yield Combination((*right, *words), refused=True)
        if name in TWICE:
            yield Combination((*right, *TWICE[name]), refused=True)
        for words in FINE.get(name, []):
            yield Combination(_with(right, words), refused=False)
        for i in range(1, len(right)):
            if not right[i].startswith("--") and not right[i - 1].startswith("--"):
                yield Combination((*right[:i], "", *right[i + 1 :]), refused=True)
        for option in known[name].params:
            if option.param_type_name != "option" or option.is_flag:
                continue
            flag = max(option.opts, key=len)
            for value, refused in values_of(flag, kind_of(option)):
                yield Combination(_with(right, [flag, value]), refused)


def _with(right: list[str], words: list[str]) -> tuple[str, ...]:
    """``right`` with ``words``, whose flags take the place of those that are there."""
    kept = list(right)
    for flag in (word for word in words if word.startswith("--") and word in kept):
        at = kept.index(flag)
        del kept[at : at + 2]
    return (*kept, *words)


def values_of(flag: str, kind: type) -> Iterator[tuple[str, bool | None]]:
    """Values of a flag, and whether they must be refused: yes, no, or either."""
    yield "", True
    if kind is int:
        yield from ((value, True) for value in (HUGE, f"-{HUGE}", "1.5", "x"))
        yield "-1", True
    elif kind is float:
        yield from ((value, True) for value in ("nan", "inf", "-inf", "x", "-1e308"))
    elif flag == "--device":
        yield from ((value, True) for value in DEVICES)
    else:
        yield from ((value, None) for value in ODD_NAMES[:3])
        yield LONG, None
    yield from ((value, kind in (int, float) or None) for value in NOT_NUMBERS[:2])


def kind_of(option: Any) -> type:
    """The type of a flag's values, by typer's own parser or by click's."""
    if (descriptor := getattr(option, "type_descriptor", None)) is not None:
        kind: type = next(iter(getattr(descriptor.annotation, "__args__", ())), descriptor.annotation)
        return kind
    return {"text": str, "integer": int, "float": float}.get(option.type.name, str)


# A workspace


def make_workspace(directory: Path) -> None:
    """``S``, a source of drawn scenes, and ``W``, a workspace of it with one of every stage."""
    from fnpipe.pipeline.scenes.dataset import write_scenes

    write_scenes(directory / "S", IMAGES, seed=1)
    lines = [
        ["shard", "S/pairs.json", "W", "--workers", "1"],
        ["embed", "W", "--model", "demo", "--name", "demo", "--workers", "0"],
        ["build-graph", "W", "--k", "4"],
        ["group", "W", "--batch-size", "4", "--search-space", "8"],
        ["mine-connections", "W", "--discriminator", "clip"],
        ["train", "W", "--method", "albef", "--run", "r", "--epochs", "1", "--set", "batch_size=8", "--threads", "1"],
    ]
    for line in lines:
        command = [sys.executable, "-m", "fnpipe.cli", *line]
        subprocess.run(command, cwd=directory, check=True, capture_output=True)


# Running them


def outcome(combination: Combination, template: Path) -> str | None:
    """Run one in a copy of the template; None where it is right, else what is wrong with it."""
    with tempfile.TemporaryDirectory() as directory:
        # One deeper than what is thrown away, for names such as "..".
        place = Path(directory) / "place"
        shutil.copytree(template, place)
        said = place / "said"
        pid = os.fork()
        if pid == 0:
            _run(combination.words, place, said)
        code = _wait(pid)
        # A process that the command began and left, such as a server of workers still importing, would lose its
        # working directory here: MKL then says that it cannot load libtorch_cpu.so.
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        lines = said.read_text(errors="replace").splitlines() if said.exists() else []
    return verdict(combination, code, lines)


def verdict(combination: Combination, code: int | None, lines: list[str]) -> str | None:
    """What is wrong with an exit code and the lines on stderr; None where nothing is."""
    if code is None:
        return "hangs"
    if any("Traceback" in line for line in lines):
        return f"traceback: {lines[-1][:150]}"
    if code not in (0, 2):
        return f"exit code {code}: {' '.join(lines)[-150:]}"
    if code == 0 and combination.refused:
        return "accepted"
    if code == 2 and combination.refused is False:
        return f"refused: {' '.join(lines)[-150:]}"
    if code == 2 and not (len([line for line in lines if line.startswith("fnpipe: ")]) == 1 and len(lines) == 1):
        return f"{len(lines)} lines: {' | '.join(lines)[:200]}"
    return None


def _run(words: tuple[str, ...], place: Path, said: Path) -> None:
    """In a child: run the command line there, leave what it says on stderr, and end."""
    import traceback

    code = 3
    os.setsid()
    os.chdir(place)
    err = io.StringIO()
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(err):
            try:
                code = run(list(words))
            except BaseException:
                traceback.print_exc()
    finally:
        said.write_text(err.getvalue(), errors="replace")
        os._exit(code)


def _wait(pid: int) -> int | None:
    """A child's exit code, or None where it took too long and was ended."""
    end = time.monotonic() + SECONDS_PER_COMBINATION
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


def load() -> None:
    """Import what the commands import, so that a child need not; nothing is computed before it forks."""
    import fnpipe.mining.connections.stage
    import fnpipe.mining.exports.stage
    import fnpipe.pipeline.embed.import_clip_retrieval
    import fnpipe.pipeline.shard.stage
    import fnpipe.train.methods
    import fnpipe.train.model.export_open_clip
    import fnpipe.train.reports.page  # noqa: F401


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--limit", type=int, help="only so many, drawn over all")
    parser.add_argument("--only", nargs="*", help="only these commands")
    arguments = parser.parse_args()
    chosen = [c for c in dict.fromkeys(combinations()) if not arguments.only or c.words[0] in arguments.only]
    random.Random(0).shuffle(chosen)
    load()
    tried: Counter[str] = Counter()
    wrong: dict[str, Counter[str]] = defaultdict(Counter)
    with tempfile.TemporaryDirectory() as directory, suppress(KeyboardInterrupt):
        make_workspace(Path(directory))
        for combination in chosen[: arguments.limit]:
            found = outcome(combination, Path(directory))
            tried[combination.words[0]] += 1
            if found:
                wrong[combination.words[0]][found.partition(":")[0]] += 1
                shown = " ".join(word[:60].encode("unicode_escape").decode() or "''" for word in combination.words)
                print(f"{shown}\n    {found}", flush=True)
    print_table(tried, wrong)


def print_table(tried: Counter[str], wrong: dict[str, Counter[str]]) -> None:
    """Per command and in all: how many were tried, how many were wrong, and in what way; then the sums as JSON."""
    kinds = sum(wrong.values(), Counter())
    print("| command | combinations | wrong | kinds |\n| --- | --- | --- | --- |")
    for name, count in [*((name, tried[name]) for name in RIGHT), ("all", tried.total())]:
        by = kinds if name == "all" else wrong[name]
        print(f"| {name} | {count} | {by.total()} | {', '.join(f'{n} {kind}' for kind, n in by.most_common())} |")
    print(json.dumps({"combinations": tried.total(), "wrong": kinds.total(), "by": dict(kinds)}))


if __name__ == "__main__":
    main()
