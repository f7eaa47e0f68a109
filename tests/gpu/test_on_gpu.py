"""The GPU path without a GPU: every stage and method on `shadow` against the CPU, and what a step waits for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

HERE = Path(__file__).parent
# How often the host waits for the device in a training step, and how many copies to it are not from pinned memory.
# These may only fall.
WAITS = {"albef": 10, "mafa": 10, "mafa-bf16": 10, "mafa-fp16": 10, "falcon": 18, "vacsr": 9, "adapter": 2}
UPLOADS = {"albef": 10, "mafa": 11, "mafa-bf16": 11, "mafa-fp16": 11, "falcon": 13, "vacsr": 3, "adapter": 3}


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    program = [sys.executable, str(HERE / "gpu_chain.py"), str(tmp_path_factory.mktemp("chain"))]
    done = subprocess.run(program, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_embeddings_graph_and_edges_on_a_gpu_are_those_of_the_cpu(chain: dict[str, Any]):
    cpu, gpu = chain["cpu"], chain["gpu"]
    for ours, theirs in zip(gpu["vectors"], cpu["vectors"], strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-3)
    assert gpu["graph"] == cpu["graph"]
    for name in ("image_id", "pair_id"):
        assert gpu["edges"][name] == cpu["edges"][name]
    np.testing.assert_allclose(gpu["edges"]["match_probability"], cpu["edges"]["match_probability"], atol=1e-4)


@pytest.mark.parametrize("run", WAITS)
def test_losses_on_a_gpu_are_those_of_the_cpu(chain: dict[str, Any], run: str):
    ours, theirs = chain["gpu"]["losses"][run], chain["cpu"]["losses"][run]
    # The noise of VACSR is drawn on its device, here by the same generator. Half precisions have lists of their own.
    np.testing.assert_allclose(ours, theirs, rtol=2e-2 if run in ("mafa-bf16", "mafa-fp16") else 1e-4)


def test_an_evaluation_on_a_gpu_finds_what_the_cpu_finds(chain: dict[str, Any]):
    ours, theirs = (chain[device]["evaluation"]["all"] for device in ("gpu", "cpu"))
    for ranking in ("dual", "itm"):
        assert ours[ranking] == pytest.approx(theirs[ranking])


@pytest.mark.parametrize("run", WAITS)
def test_a_step_waits_for_the_device_no_more_often_than_it_may(chain: dict[str, Any], run: str):
    events = chain["gpu"]["events"][run]
    waits = {kind: places for kind, places in events.items() if kind.startswith("wait")}
    assert sum(sum(places.values()) for places in waits.values()) == WAITS[run], waits
    unpinned = {kind: places for kind, places in events.items() if kind.startswith("upload, unpinned")}
    assert sum(sum(places.values()) for places in unpinned.values()) == UPLOADS[run], unpinned
