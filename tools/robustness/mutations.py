"""Put one fault after the other into a copy of the project, and see whether the tests notice.

    python tools/robustness/mutations.py [--only WORDS]

The faults are those of `faults.txt`: wrong signs, ``>`` for ``>=``, swapped directions and thresholds, own pairs that
are not excluded, and the like, each a few characters of one file. Every fault gets a process of its own, forked from
one that has imported the large libraries and nothing of ours. The process runs the tests that belong to the file, stops
at the first that fails, and checks that all of `fnpipe` came from the copy and that the faulty file was among it. A
fault in a file with compiled loops starts without their cached machine code. Without any fault the tests must pass.

The last line of the output is one JSON object; the exit code is 0 if at least nine in ten faults were caught.
"""

from __future__ import annotations

import os

# Before anything that could start threads: a process that has some cannot be forked safely.
os.environ["OMP_NUM_THREADS"] = "1"

import argparse
import importlib
import json
import resource
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import hypothesis
import pytest

# Imported once, for all forks.
LARGE = ("open_clip", "pyarrow.parquet", "torchvision.transforms.v2")
HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PACKAGES = ("pipeline", "mining", "train", "cli")
ENOUGH = 0.9
# A fault may make a loop endless; the tests of one file take a few seconds.
CPU_SECONDS = 120
# Exit codes of a fork, beside pytest's: 0 all passed, 1 some failed.
FOREIGN, UNUSED = 90, 91


@dataclass(frozen=True)
class Fault:
    """A change of one file, ``old`` into ``new``; ``says`` what is wrong then. ``tests``: pytest's arguments."""

    file: str
    tests: tuple[str, ...]
    says: str
    old: str
    new: str


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--only", default="", help="only faults that have these words in their file or description")
    words = options.parse_args().only
    chosen = [fault for fault in read_faults(HERE / "faults.txt") if words in f"{fault.file}: {fault.says}"]
    with tempfile.TemporaryDirectory(prefix="fnpipe-mutations-") as directory:
        report = check(copy_project(Path(directory).resolve()), chosen)
    print(json.dumps(report))
    sys.exit(0 if report["share"] >= ENOUGH else 1)


def read_faults(path: Path) -> Iterator[Fault]:
    """The faults in ``path``, whose first lines say how it is written."""
    file, *tests = "", ""
    for block in path.read_text().split("\n\n"):
        lines = [line for line in block.splitlines() if not line.startswith("#")]
        if lines and lines[0].startswith("== "):
            file, *tests = shlex.split(lines[0][3:])
        elif lines:
            old, new = ("\n".join(line[2:] for line in lines[1:] if line[0] == sign) for sign in "-+")
            yield Fault(file, tuple(tests), lines[0], old, new)


def check(tree: Path, faults: Sequence[Fault]) -> dict[str, object]:
    """Run the tests of every fault without one, then with it, and print a line each."""
    start = time.monotonic()
    for name in LARGE:
        importlib.import_module(name)
    for tests in dict.fromkeys(fault.tests for fault in faults):
        code, output = run_tests(tree, tests, cache=tree / "numba")
        if code != 0:
            sys.exit(f"{' '.join(tests)}: exit {code} without any fault\n{output}")
    survivors = []
    for number, fault in enumerate(faults):
        code, output = run_fault(tree, fault, number)
        # Compiled code that reads beyond its arrays may end the process.
        caught = code in (1, -signal.SIGXCPU, -signal.SIGSEGV, -signal.SIGBUS, -signal.SIGABRT)
        if not caught and code != 0:
            sys.exit(f"{fault.file}: {fault.says}: exit {code}\n{output}")
        if not caught:
            survivors.append(f"{fault.file}: {fault.says}")
        print(f"{'caught' if caught else 'SURVIVED':8}  {fault.file:22}  {fault.says:75}  {_by(output)}", flush=True)
    return {
        "faults": len(faults),
        "caught": len(faults) - len(survivors),
        "share": round(1 - len(survivors) / max(1, len(faults)), 4),
        "survivors": survivors,
        "minutes": round((time.monotonic() - start) / 60, 1),
    }


def copy_project(tree: Path) -> Path:
    """Lay the packages under ``tree/fnpipe``, the tests beside them; return ``tree``."""
    no_caches = shutil.ignore_patterns("__pycache__", ".pytest_cache")
    shutil.copytree(ROOT / "api", tree / "fnpipe", ignore=no_caches)
    for package in PACKAGES:
        shutil.copytree(ROOT / package, tree / "fnpipe" / package, ignore=no_caches)
    shutil.copytree(ROOT / "tests", tree / "tests", symlinks=True, ignore=no_caches)
    shutil.copy(ROOT / "pyproject.toml", tree)
    return tree


def run_fault(tree: Path, fault: Fault, number: int) -> tuple[int, str]:
    """Run the tests of ``fault`` with it; the file is as it was afterwards. Every fault has its own ``number``."""
    path = tree / "fnpipe" / fault.file
    text = path.read_text()
    if text.count(fault.old) != 1:
        sys.exit(f"{fault.file}: {fault.says}: {text.count(fault.old)} places instead of one have {fault.old!r}")
    modified = path.stat().st_mtime
    try:
        path.write_text(text.replace(fault.old, fault.new))
        # Python takes its compiled code as fresh by second and size, which a fault may share with the file or another.
        os.utime(path, (modified, modified + 60 * (number + 1)))
        fresh = tree / f"numba-{number}"
        return run_tests(tree, fault.tests, fresh if "@compiled" in text else tree / "numba", faulty=path)
    finally:
        path.write_text(text)
        os.utime(path, (modified, modified))


def run_tests(tree: Path, tests: Sequence[str], cache: Path, faulty: Path | None = None) -> tuple[int, str]:
    """The exit code (of a killed process: minus the signal) and the output of pytest in a fork."""
    log = tree / "output.txt"
    child = os.fork()
    if child == 0:
        # Whatever happens, the fork must not go on as the parent.
        try:
            os._exit(_in_fork(tree, tests, cache, faulty, log))
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
            os._exit(70)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return code, log.read_text(errors="replace")


def _in_fork(tree: Path, tests: Sequence[str], cache: Path, faulty: Path | None, log: Path) -> int:
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 5))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.environ |= {"PYTHONPATH": str(tree), "NUMBA_CACHE_DIR": str(cache)}
    sys.path.insert(0, str(tree))
    os.chdir(tree)
    # The same examples for every fault, and none spent on making a failing one smaller.
    quick = [hypothesis.Phase.explicit, hypothesis.Phase.generate]
    hypothesis.settings.register_profile("mutations", derandomize=True, database=None, phases=quick)
    hypothesis.settings.load_profile("mutations")
    # A plugin of pytest may be loaded already, by a library that uses its package too.
    loaded = "ignore::pytest.PytestAssertRewriteWarning"
    code = int(pytest.main([*tests, "-x", "--tb=line", "-p", "no:cacheprovider", "-W", loaded]))
    sys.stdout.flush()
    ours = {
        Path(module.__file__)
        for name, module in list(sys.modules.items())
        if name.startswith("fnpipe.") and getattr(module, "__file__", None)
    }
    if not ours or not all(path.is_relative_to(tree) for path in ours):
        return FOREIGN
    return UNUSED if faulty is not None and faulty not in ours else code


def _by(output: str) -> str:
    """The test that failed, of pytest's output."""
    failed = [line.split(" ")[1].split("::")[-1] for line in output.splitlines() if line.startswith("FAILED ")]
    return failed[0] if failed else ""


if __name__ == "__main__":
    main()
