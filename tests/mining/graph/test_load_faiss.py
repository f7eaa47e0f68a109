"""FAISS is loaded with kernels that fit the processor, and says so."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from fnpipe.mining.graph import load_faiss


def kernel_of_fresh_process(**environment: str) -> str:
    program = (
        "import os; from fnpipe.mining.graph.load_faiss import blas_kernel; "
        "print(blas_kernel(), os.environ.get('OPENBLAS_CORETYPE'))"
    )
    clean = {name: value for name, value in os.environ.items() if name != "OPENBLAS_CORETYPE"}
    command = [sys.executable, "-c", program]
    return subprocess.run(
        command, env=clean | environment, check=True, stdout=subprocess.PIPE, text=True
    ).stdout.strip()


@pytest.mark.skipif(load_faiss.blas_kernel() == "unknown", reason="FAISS has no OpenBLAS here")
def test_the_kernels_fit_the_processor_unless_somebody_chose_others():
    wanted = {"AVX512": "SkylakeX", "AVX2": "Haswell"}.get(torch.backends.cpu.get_cpu_capability())
    if wanted is None:
        pytest.skip("an old processor, or none of Intel's kind")
    assert kernel_of_fresh_process() == f"{wanted} None"
    assert kernel_of_fresh_process(OPENBLAS_CORETYPE="Haswell") == "Haswell Haswell"


def test_kernels_that_do_not_fit_are_one_line_with_the_way_out(monkeypatch: pytest.MonkeyPatch):
    assert load_faiss.blas_note() is None
    monkeypatch.setattr(load_faiss, "_WANTED", {torch.backends.cpu.get_cpu_capability(): "SkylakeX"})
    monkeypatch.setattr(load_faiss, "blas_kernel", lambda: "Prescott")
    assert "runs Prescott kernels" in str(load_faiss.blas_note())
    assert "set OPENBLAS_CORETYPE=SkylakeX" in str(load_faiss.blas_note())
    monkeypatch.setattr(load_faiss, "_multiplies", lambda: False)
    assert "wrong products" in str(load_faiss.blas_note())
