"""Loading FAISS with BLAS kernels that fit the processor.

FAISS's wheels carry an OpenBLAS that does not know newer processors: there it falls back to SSE kernels, at a sixth of
the speed, for k-means, assignment and flat search alike. ``OPENBLAS_CORETYPE`` names the kernels, and is read once,
when the library is loaded.
"""

from __future__ import annotations

import ctypes
import os
import sys
from typing import Any

import numpy as np
import torch

_VARIABLE = "OPENBLAS_CORETYPE"
# By what torch finds in the processor: the kernels that any such processor runs well, and all of OpenBLAS's that fit.
_WANTED = {"AVX512": "SkylakeX", "AVX2": "Haswell"}
_FITTING = ("Haswell", "Zen", "SkylakeX", "Cooperlake", "SapphireRapids")


def load_faiss() -> Any:
    """The module ``faiss``, on one thread per caller; sets the kernels first where nobody has chosen any.

    Work that FAISS gets here comes in pieces of fixed size, a thread each: the same bytes for any number of threads.
    """
    wanted = _WANTED.get(torch.backends.cpu.get_cpu_capability())
    ours = "faiss" not in sys.modules and _VARIABLE not in os.environ and wanted is not None
    if ours:
        os.environ[_VARIABLE] = str(wanted)
    try:
        import faiss
    finally:
        if ours:
            del os.environ[_VARIABLE]
    # OpenMP's setting counts for the calling thread alone.
    faiss.omp_set_num_threads(1)
    return faiss


def blas_kernel() -> str:
    """The name of the kernels that FAISS's OpenBLAS runs; ``unknown`` where it has another BLAS."""
    faiss = load_faiss()
    try:
        # Looked up in what FAISS itself is linked to: numpy and torch bring libraries of the same name.
        name = ctypes.CDLL(faiss.swigfaiss._swigfaiss.__file__)["openblas_get_corename"]
    except (AttributeError, OSError):
        return "unknown"
    name.restype = ctypes.c_char_p
    return str(name().decode())


def blas_note() -> str | None:
    """What is wrong with FAISS's BLAS, and the way out; None where it fits and multiplies as numpy does."""
    kernel, wanted = blas_kernel(), _WANTED.get(torch.backends.cpu.get_cpu_capability())
    if not _multiplies():
        return f"FAISS's BLAS ({kernel} kernels) computes wrong products here; set {_VARIABLE}=Haswell"
    if wanted is None or kernel == "unknown" or kernel in _FITTING:
        return None
    return f"FAISS's BLAS runs {kernel} kernels, several times slower than this processor; set {_VARIABLE}={wanted}"


def _multiplies() -> bool:
    """Whether one product is numpy's: old kernels can also go wrong on new processors."""
    rows = np.random.default_rng(0).standard_normal((300, 96), np.float32)
    # From 20 queries on, flat search is a product of matrices.
    sims, _ = load_faiss().knn(rows[:150], rows, 1, metric=0)
    return bool(np.allclose(sims[:, 0], (rows[:150] @ rows.T).max(axis=1), rtol=1e-4))
