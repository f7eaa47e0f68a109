"""The rehearsal of the whole chain: its commands and tables, how it resumes, and what it carries on to more pairs."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conftest import ROOT
from fnpipe.cli.main import run as run_command

BENCHMARKS = ROOT / "benchmarks" / "scale"
SCENES = 320


def load_script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where its dataclasses, and the other script, look for it
    spec.loader.exec_module(module)
    return module


rehearsal = load_script("rehearsal")
outlook = load_script("outlook")


def in_this_process(command: Sequence[str], directory: Path) -> tuple[rehearsal.Usage, str]:
    """Stands for `measure`, which would start a dozen interpreters: the same command, its figures made up."""
    arguments, out = list(command[command.index("-m") + 2 :] if "-m" in command else command[2:]), io.StringIO()
    with (
        contextlib.chdir(directory) if hasattr(contextlib, "chdir") else _chdir(directory),
        contextlib.redirect_stdout(out),
    ):
        if arguments[0] == "--draw":
            rehearsal.draw(Path(arguments[1]), int(arguments[2]))
        else:
            assert run_command(arguments) == 0, arguments
    return rehearsal.Usage(1.0, 2.0, 30.0, 4.0), out.getvalue()


@contextlib.contextmanager
def _chdir(directory: Path):
    before = Path.cwd()
    os.chdir(directory)
    try:
        yield
    finally:
        os.chdir(before)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("rehearsal")


@pytest.fixture(scope="module")
def small(root: Path):
    """The whole chain on a few hundred scenes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rehearsal, "measure", in_this_process)
        return rehearsal.rehearse(root, SCENES, 480)


def test_every_stage_of_the_chain_runs_and_its_sums_hold(small):
    facts = {name: stage["facts"] for name, stage in small.stages.items()}
    assert list(facts) == [stage.name for stage in rehearsal.chain(SCENES)]
    shard, mined = facts["shard"], facts["mine-connections"]
    assert shard["rows"] == SCENES == shard["kept"] + sum(shard["quarantined"].values())
    assert shard["splits"] == {"test": SCENES // 10, "train": SCENES - SCENES // 10}
    for stage in ("group, M = 1,920", "group, M = all"):
        assert facts[stage]["planned"] + facts[stage]["dropped"] == facts[stage]["images"] == shard["splits"]["train"]
        assert facts[stage]["planned"] == facts[stage]["batches"] * rehearsal.BATCH
    assert facts["mine-connections --plan"]["judgements"] == mined["judgements"]
    assert mined["unique_combinations"] == mined["judgements"] + mined["identity"] + mined["undecodable"]
    assert sum(mined["labels"].values()) == mined["unique_combinations"] - mined["undecodable"]
    assert facts["train, one epoch"]["steps"] == facts["group, M = 1,920"]["batches"]
    assert facts["inspect --html"]["matching"] == mined["labels"]["positive"]
    assert facts["export"]["recorded"] == shard["splits"]["train"]


def test_a_stage_counts_the_bytes_that_it_left(small, root: Path):
    left = small.stages["embed"]["bytes"]
    vectors = sum(path.stat().st_size for path in (root / str(SCENES) / "work" / "embeddings").rglob("*.npy"))
    assert vectors > SCENES * 2 * 2 * small.stages["embed"]["facts"]["width"]
    assert vectors <= left < 1.2 * vectors


def test_a_stage_that_was_measured_is_not_run_again(small, root: Path, monkeypatch: pytest.MonkeyPatch):
    ran = []

    def counted(command: Sequence[str], directory: Path) -> tuple[rehearsal.Usage, str]:
        ran.append(command)
        return in_this_process(command, directory)

    results = root / str(SCENES) / rehearsal.RESULTS
    stages = json.loads(results.read_text())
    del stages["evaluate"]
    results.write_text(json.dumps(stages))
    monkeypatch.setattr(rehearsal, "measure", counted)
    again = rehearsal.rehearse(root, SCENES, 480)
    assert [command[3] for command in ran] == ["evaluate"]
    assert again.stages["mine-connections"] == small.stages["mine-connections"]


def made_up(scenes: int, seconds: float, mib: float, stages: Sequence[str] = ("draw", "shard")):
    usage = {"wall_seconds": 2 * seconds, "cpu_seconds": seconds, "anonymous_mib": mib, "mapped_mib": 1.0, "bytes": 0}
    return rehearsal.Rehearsal(scenes, {name: {**usage, "facts": {}} for name in stages})


@given(power=st.floats(0.3, 2.5), share=st.floats(0, 0.95), scale=st.floats(1e-4, 1e-2))
def test_growth_finds_the_power_whatever_the_start_takes(power: float, share: float, scale: float):
    start = share * scale * 100_000**power
    some = [made_up(n, start + scale * n**power * (n > 1), 0) for n in (1, 10_000, 30_000, 100_000)]
    assert rehearsal.growth(some, "draw") == pytest.approx(power, abs=1e-3)


@pytest.mark.parametrize("largest", [2, 3, 5.9])
def test_a_stage_that_takes_hardly_more_than_its_start_has_no_growth(largest: float):
    assert rehearsal.growth([made_up(1, 3, 0), made_up(10, 3, 0), made_up(100, largest, 0)], "draw") is None


def test_a_stage_worse_than_linear_stands_out_and_the_last_row_is_the_sum():
    sizes = (1, 10_000, 100_000)
    some = [made_up(n, 5 + 1e-4 * n * (n > 1), 100 + n / 1000) for n in sizes]
    for one in some[1:]:
        one.stages["draw"]["cpu_seconds"] = 5 + 1e-8 * one.scenes**2
    draw, shard, every = rehearsal._time_table(some).splitlines()[-3:]
    assert "| 2.00 **worse than linear** |" in draw
    assert shard.endswith("| 1.00 |")
    assert every == "| all | 20 / 10 | 24 / 12 | 60 / 120 |  |"
    assert rehearsal._size_table(some).splitlines()[-1].startswith("| shard | 100 + 1 | 110 + 1 | 200 + 1 | 1.02 |")


def test_fewer_candidates_are_judged_where_all_would_take_too_long():
    assert rehearsal.affordable(100, 480) == 8
    assert rehearsal.affordable(960, 480) == 4
    assert rehearsal.affordable(1e9, 480) == 1


def test_tables_of_a_rehearsal_have_a_row_for_every_stage(small):
    shown = rehearsal.report([made_up(1, 0.5, 10, list(small.stages)), small][1:])
    for name in small.stages:
        assert shown.count(f"| {name} |") == 2
    for part in shown.split("\n\n"):
        assert len({line.count("|") for line in part.splitlines()}) == 1


MEASURING = """
import json, subprocess, sys
from dataclasses import asdict
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from rehearsal import measure

# The grandchild outlives its parent, which waits until both hold their memory; its work counts all the same.
hold = "x = bytearray(%d << 20); x[::4096] = b'1' * len(x[::4096]); sum(range(6_000_000)); import time; "
grandchild = hold % 60 + "print(flush=True); time.sleep(2)"
child = "import subprocess, sys; " + hold % 40
child += f"them = subprocess.Popen([sys.executable, '-c', {grandchild!r}], stdout=subprocess.PIPE); "
child += "them.stdout.readline(); time.sleep(1); print('done')"
usage, output = measure([sys.executable, "-c", child], Path(sys.argv[2]))
print(json.dumps({**asdict(usage), "output": output}))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_measuring_sees_the_memory_and_the_work_of_the_whole_tree(tmp_path: Path):
    command = [sys.executable, "-c", MEASURING, str(BENCHMARKS), str(tmp_path)]
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert found["output"] == "done\n"
    assert 100 < found["anonymous_mib"] < 160
    alone = timed_sum()
    assert found["cpu_seconds"] > 1.2 * alone  # of one process it would be alone


def timed_sum() -> float:
    """CPU seconds of the work of one of the two processes."""
    before = os.times()
    sum(range(6_000_000))
    after = os.times()
    return after.user + after.system - before.user - before.system


def test_a_stage_that_fails_is_named(tmp_path: Path):
    script = f"import sys; sys.path.insert(0, {str(BENCHMARKS)!r}); from pathlib import Path; import rehearsal; "
    script += f"rehearsal.measure([sys.executable, '-c', 'exit(3)'], Path({str(tmp_path)!r}))"
    failed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert failed.returncode == 1
    assert "ended with 3" in failed.stderr


def test_the_outlook_grows_with_the_pairs_and_never_passes_off_an_estimate_as_measured(small):
    rehearsals = [small, rehearsal.Rehearsal(10 * SCENES, small.stages)]
    one, ten = (outlook.outlook(pairs, rehearsals) for pairs in (4_000_000, 40_000_000))
    assert [row.stage for row in one] == [row.stage for row in ten]
    for less, more in zip(one, ten, strict=True):
        if more.hours is not None and less.hours is not None:
            assert more.hours == pytest.approx(10 * less.hours, nan_ok=True)
        assert more.disk == pytest.approx(10 * less.disk)
    lines = outlook.render(400_000_000, outlook.outlook(400_000_000, rehearsals), 1e10).splitlines()[4:]
    assert len(lines) == len(one)
    for line in lines:
        _, _, cores, gpu, disk, memory, _ = line.split("|")
        assert memory.strip().startswith("~")
        assert cores.strip() == "-" or cores.strip().startswith("~")
        assert gpu.strip() == "-" or gpu.strip().endswith("?")
        assert disk.strip() == "-" or disk.strip().startswith("~")


@pytest.mark.parametrize(
    ("value", "shown"), [(0.05, "3.0 min"), (1.0, "1.0 h"), (47.0, "47.0 h"), (24 * 400.0, "400 days")]
)
def test_hours_are_shown_in_the_unit_that_reads_best(value: float, shown: str):
    assert outlook.hours(value) == shown


def test_a_gpu_takes_longer_at_a_smaller_share_of_its_peak():
    best, worst = outlook.gpu(3600 * outlook.GPU_FLOPS)
    assert np.allclose([best, worst], [1 / max(outlook.SHARES), 1 / min(outlook.SHARES)])
