"""FAISS is loaded with kernels that fit the processor, and says so."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from fnpipe.mining.graph import blas


def kernel_of_fresh_process(**environment: str) -> str:
    program = (
        "import os; from fnpipe.mining.graph.blas import blas_kernel; "
        "print(blas_kernel(), os.environ.get('OPENBLAS_CORETYPE'))"
    )
    clean = {name: value for name, value in os.environ.items() if name != "OPENBLAS_CORETYPE"}
    command = [sys.executable, "-c", program]
    return subprocess.run(
        command, env=clean | environment, check=True, stdout=subprocess.PIPE, text=True
    ).stdout.strip()


@pytest.mark.skipif(blas.blas_kernel() == "unknown", reason="FAISS has no OpenBLAS here")
def test_the_kernels_fit_the_processor_unless_somebody_chose_others():
    wanted = {"AVX512": "SkylakeX", "AVX2": "Haswell"}.get(torch.backends.cpu.get_cpu_capability())
    if wanted is None:
        pytest.skip("an old processor, or none of Intel's kind")
    assert kernel_of_fresh_process() == f"{wanted} None"
    assert kernel_of_fresh_process(OPENBLAS_CORETYPE="Haswell") == "Haswell Haswell"


def test_kernels_that_do_not_fit_are_one_line_with_the_way_out(monkeypatch: pytest.MonkeyPatch):
    assert blas.blas_note() is None
    monkeypatch.setattr(blas, "_WANTED", {torch.backends.cpu.get_cpu_capability(): "SkylakeX"})
    monkeypatch.setattr(blas, "blas_kernel", lambda: "Prescott")
    assert "runs Prescott kernels" in str(blas.blas_note())
    assert "set OPENBLAS_CORETYPE=SkylakeX" in str(blas.blas_note())
    monkeypatch.setattr(blas, "_multiplies", lambda: False)
    assert "wrong products" in str(blas.blas_note())
