"""Hold every stage to what all of them promise; above all, kill it, run it again, and compare every byte.

    python tools/robustness/kill_stages.py [--first 40 --later 20 --scenes 24 --stages shard embed ...]
                                           [--only killed overwritten ... --seed 0 --place DIR]

A round starts from the files that the stages before it left. The promises, each with the rounds that try it:

again        a finished stage run again changes no byte and ends as it should.
refused      with other parameters it ends in one line and changes nothing.
held         halted half-way, it keeps off a second run of itself, a new sharding, and every --overwrite of what it
             reads, each of which ends in one line; then it goes on and leaves the bytes of a run left alone.
killed       killed (SIGKILL) just before one of its first changes to the file system, or before a random later one, and
             run again, it leaves the bytes of a run left alone, and nothing beside them.
overwritten  the same where it is finished with other parameters and is killed while --overwrite makes it anew; the
             command that is run again has no --overwrite. It leaves the new stage, or ends in one line and the old
             stage, whole, or in one line that asks for --overwrite, with which the new one comes.

The last line of the output is one JSON object: the outcomes by stage and promise, and every fault in words.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from stages import STAGES, Chain, contents, difference, finish, killed_at, one_line, start_run


@dataclass(frozen=True)
class Kills:
    """Before which changes a stage is killed: every one of the ``first``, and ``later`` random ones after them."""

    first: int
    later: int
    draws: random.Random

    def places(self, changes: int) -> list[int]:
        after = range(self.first + 1, changes + 1)
        later = self.draws.sample(after, min(self.later, len(after)))
        return [*range(1, min(self.first, changes) + 1), *sorted(later)]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--first", type=int, default=40, help="kill before every one of so many first changes")
    options.add_argument("--later", type=int, default=20, help="and before so many random later ones")
    options.add_argument("--scenes", type=int, default=24)
    options.add_argument("--stages", nargs="+", choices=list(STAGES), default=list(STAGES))
    options.add_argument("--only", nargs="+", choices=list(PROMISES), default=list(PROMISES))
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--place", help="a directory on the file system under test")
    chosen = options.parse_args()
    outcomes: dict[str, dict[str, dict[str, int]]] = {}
    faults: list[str] = []
    with tempfile.TemporaryDirectory(prefix="fnpipe-kill-", dir=chosen.place) as directory:
        chain = Chain(Path(directory), chosen.scenes)
        for name in chosen.stages:
            outcomes[name] = {}
            for promise in chosen.only:
                kills = Kills(chosen.first, chosen.later, random.Random(f"{chosen.seed} {name} {promise}"))
                found = Counter[str]()
                for what, outcome in PROMISES[promise](chain, name, kills):
                    found[outcome.partition(":")[0]] += 1
                    if outcome.startswith("FAULT"):
                        faults.append(f"{name}, {promise}, {what}: {outcome}")
                        print(faults[-1])
                outcomes[name][promise] = dict(found)
                print(f"{name}, {promise}: {dict(found)}", flush=True)
    print(json.dumps({"outcomes": outcomes, "totals": totals(outcomes), "faults": faults}))
    sys.exit(1 if faults else 0)


def totals(outcomes: dict[str, dict[str, dict[str, int]]]) -> dict[str, dict[str, int]]:
    """The outcomes of every promise, of all stages together."""
    found: dict[str, Counter[str]] = {}
    for promises in outcomes.values():
        for promise, counts in promises.items():
            found.setdefault(promise, Counter()).update(counts)
    return {promise: dict(counts) for promise, counts in found.items()}


# What a round was, and what came of it: a word, and after FAULT a colon and the reason.
Rounds = Iterator[tuple[str, str]]


def again(chain: Chain, name: str, _: Kills) -> Rounds:
    chain.finished(name)
    before = as_they_are(chain.place)
    code, said = run(chain, STAGES[name].command(chain.place))
    changed = difference(before, as_they_are(chain.place))
    kept = STAGES[name].fine(code, said) and not changed
    yield "run again", "kept" if kept else f"FAULT: code {code}, {changed[:5]}, {said[-500:]}"


def refused(chain: Chain, name: str, _: Kills) -> Rounds:
    if not STAGES[name].other:
        return
    chain.finished(name)
    yield "other parameters", refusal(chain, STAGES[name].command(chain.place, *STAGES[name].other), "started with")


def held(chain: Chain, name: str, _: Kills) -> Rounds:
    whole, stage = contents(chain.after(name)), STAGES[name]
    chain.before(name)
    words = stage.command(chain.place)
    halted = start_run(words, chain.root / "halted", stop_at=chain.changes[name] * 3 // 4, stop_by=signal.SIGSTOP)
    try:
        if not os.WIFSTOPPED(os.waitpid(halted.process, os.WUNTRACED)[1]):
            raise SystemExit(f"{name}: was not halted: {halted.log.read_text()}")
        if not stage.shared:
            yield "a second run", refusal(chain, words, "is at work here")
        for need in {"shard", *stage.needs} - {name}:
            if STAGES[need].other:
                other = STAGES[need].command(chain.place, *STAGES[need].other, "--overwrite")
                yield f"an overwriting {need}", refusal(chain, other, "is at work here")
    finally:
        os.kill(halted.process, signal.SIGCONT)
    code, said = finish(halted)
    differing = difference(whole, contents(chain.place))
    fine = code == 0 and not differing
    yield "going on", "new" if fine else f"FAULT: code {code}, {differing[:5]}, {said[-500:]}"


def killed(chain: Chain, name: str, kills: Kills) -> Rounds:
    whole, stage = contents(chain.after(name)), STAGES[name]
    for at in kills.places(chain.changes[name]):
        chain.before(name)
        words = stage.command(chain.place)
        died = killed_at(words, chain.log, at)
        code, said = run(chain, words)
        differing = difference(whole, contents(chain.place))
        fine = stage.fine(code, said) and not differing
        found = "new" if died else "too late"
        yield f"at change {at}", found if fine else f"FAULT: code {code}, {differing[:5]}, {said[-500:]}"


def overwritten(chain: Chain, name: str, kills: Kills) -> Rounds:
    if not STAGES[name].other:
        return
    whole = contents(chain.after(name))
    chain.before_overwriting(name)
    for at in kills.places(chain.changes[f"{name}.other"]):
        old = chain.before_overwriting(name)
        yield f"at change {at}", after_overwriting(chain, name, at, whole, old)


def after_overwriting(chain: Chain, name: str, at: int, whole: dict[str, str], old: dict[str, str]) -> str:
    """What is there after an --overwrite was killed before change ``at``, and the command was run again without it.

    Args:
        whole: the contents that the stage leaves. old: those of the one that it overwrites.

    Returns:
        ``new``, ``old``, ``refused``, ``too late`` (it was finished before), or ``FAULT: ...``.
    """
    words = STAGES[name].command(chain.place)
    overwriting = [*words, "--overwrite"]
    died = killed_at(overwriting, chain.log, at)
    code, said = run(chain, words)
    found = contents(chain.place)
    if code == 0 and not difference(whole, found):
        return "new" if died else "too late"
    if one_line(code, said):
        if not difference(old, {file: digest for file, digest in found.items() if "/.tmp-" not in f"/{file}"}):
            return "old"
        code, said = run(chain, overwriting)
        found = contents(chain.place)
        if code == 0 and not difference(whole, found):
            return "refused"
    return f"FAULT: code {code}, {difference(whole, found)[:5]}, {said[-500:]}"


PROMISES: dict[str, Callable[[Chain, str, Kills], Rounds]] = {
    "again": again,
    "refused": refused,
    "held": held,
    "killed": killed,
    "overwritten": overwritten,
}


def refusal(chain: Chain, words: list[str], because: str) -> str:
    """Run a command that must end in one line, for this reason, and change nothing."""
    before = as_they_are(chain.place)
    code, said = run(chain, words)
    changed = difference(before, as_they_are(chain.place))
    kept = one_line(code, said) and because in said and not changed
    return "refused" if kept else f"FAULT: code {code}, {changed[:5]}, {said[-500:]}"


def run(chain: Chain, words: list[str]) -> tuple[int, str]:
    return finish(start_run(words, chain.log))


def as_they_are(root: Path) -> dict[str, str]:
    """The bytes of every file, by their digest; but for locks, in which the newest holder stands."""
    files = (path for path in root.rglob("*") if path.is_file() and not path.name.endswith(".lock"))
    return {str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


if __name__ == "__main__":
    main()
