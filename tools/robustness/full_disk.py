"""Run every stage on a disk that is full, and on one that may only be read; then give it room, and compare the bytes.

    python tools/robustness/full_disk.py [--scenes 300 --stages shard embed ... --room 0 0.3 0.7]

Needs root, for a small file system in memory is mounted and grown. A round copies what the stages before left onto it,
leaves the given share of the room that the stage needs, and runs it: it must end with exit code 1 and one line, or
finish. With room it must then give the bytes of a run that was left alone. On the file system that may only be read, a
stage must end in one line and change nothing, and a finished one must say so as ever. The last line of the output is
one JSON object.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from stages import STAGES, Chain, contents, difference, finish, start_run

# Room beside the files: directories, names, and what a page rounds up.
SLACK_BYTES = 256 << 10
ROOMY_BYTES = 1 << 30


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--scenes", type=int, default=300)
    options.add_argument("--stages", nargs="+", choices=list(STAGES), default=list(STAGES))
    options.add_argument("--room", nargs="+", type=float, default=[0.0, 0.3, 0.7])
    chosen = options.parse_args()
    with tempfile.TemporaryDirectory(prefix="fnpipe-full-") as directory:
        root = Path(directory)
        chain = Chain(root, chosen.scenes)
        with memory_disk(chain.place):
            report = fill(chain, chosen.stages, chosen.room)
    print(json.dumps(report))
    sys.exit(1 if report["failed"] else 0)


@contextmanager
def memory_disk(place: Path) -> Iterator[None]:
    """Mount a file system in memory at ``place``."""
    place.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={ROOMY_BYTES}", "none", place], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", place], check=True)


def remount(place: Path, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", place], check=True)


def fill(chain: Chain, stages: Sequence[str], shares: Sequence[float]) -> dict[str, Any]:
    """Rounds of every stage; what failed, in words."""
    failed: list[str] = []
    full = 0
    for name in stages:
        whole = contents(chain.after(name))
        needed = size_of(chain.root / name)
        for share in shares:
            chain.before(name)
            there = size_of(chain.place)
            remount(chain.place, f"size={there + int(share * max(needed - there, 0)) + SLACK_BYTES // 16}")
            code, said = finish(start_run(STAGES[name].command(chain.place), chain.root / "log"))
            full += code == 1
            remount(chain.place, f"size={ROOMY_BYTES}")
            again, said_again = finish(start_run(STAGES[name].command(chain.place), chain.root / "log"))
            fine = again == 0 or (again == 2 and str(STAGES[name].again) in said_again)
            problems = [
                *(["a traceback"] if "Traceback" in said else []),
                *([f"code {code}"] if code not in (0, 1) else []),
                *(["no line that says so"] if code == 1 and "No space left" not in said else []),
                *([f"the rerun ends with code {again}: {said_again[-300:]}"] if not fine else []),
                *difference(whole, contents(chain.place))[:3],
            ]
            report(failed, f"{name} with {share:.0%} of its room", problems, said)
        problems = read_only(chain, name)
        report(failed, f"{name} where nothing may be written", problems, "")
    return {"stages": len(stages), "rounds": len(stages) * (len(shares) + 1), "ended_full": full, "failed": failed}


def read_only(chain: Chain, name: str) -> list[str]:
    """What goes wrong where the stage, begun or finished, may not write."""
    problems = []
    for state in ("before", "after"):
        chain.after(name)
        chain.before(name)
        if state == "after":
            finish(start_run(STAGES[name].command(chain.place), chain.root / "log"))
        was = contents(chain.place)
        remount(chain.place, "ro")
        code, said = finish(start_run(STAGES[name].command(chain.place), chain.root / "log"))
        remount(chain.place, "rw")
        ends = (0, 1, 2) if state == "after" else (1, 2)
        lines = [line for line in said.splitlines() if line.startswith("fnpipe: ")]
        if "Traceback" in said or code not in ends or (code and len(lines) != 1):
            problems.append(f"{state}: code {code}, {said[-400:]}")
        problems += [f"{state}: {changed}" for changed in difference(was, contents(chain.place))[:3]]
    return problems


def report(failed: list[str], what: str, problems: list[str], said: str) -> None:
    last = said.strip().splitlines()[-1] if said.strip() else ""
    print(f"{what}: {'; '.join(problems) or 'fine'} | {last[:160]}", flush=True)
    failed += [f"{what}: {problem}" for problem in problems]


def size_of(place: Path) -> int:
    """Bytes that the files below take, in whole pages."""
    return sum(-(-p.stat().st_size // 4096) * 4096 for p in place.rglob("*") if p.is_file())


if __name__ == "__main__":
    main()
