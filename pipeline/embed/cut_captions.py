"""Captions that a tokenizer cuts: how many there are, and how many different ones become the same to the model."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from itertools import compress

import numpy as np
import pyarrow as pa
import torch

# One row per caption that is cut: what is left of it, and the whole of it, as digests.
CUT_SCHEMA = pa.schema([("left", pa.int64()), ("whole", pa.int64())])


def find_cut(
    tokenize: Callable[[list[str]], torch.Tensor], captions: Sequence[str], tokens: torch.Tensor
) -> torch.Tensor:
    """The rows of `CUT_SCHEMA` for captions and their tokens, (n, L): (cut ones, 2) int64.

    None where ``tokenize`` has no ``is_cut`` to say it. Only captions that fill their row are looked at again.
    """
    is_cut: Callable[[list[str]], list[bool]] | None = getattr(tokenize, "is_cut", None)
    if is_cut is None or not len(tokens):
        return torch.empty((0, 2), dtype=torch.int64)
    # The last of a row that is full is the end of text, so that padding shows in the one before.
    full = (tokens[:, -1] != tokens[:, -2]).nonzero()[:, 0].tolist() if tokens.shape[1] > 1 else []
    cut = list(compress(full, is_cut([captions[row] for row in full])))
    digests = [(_digest(tokens[row].numpy().tobytes()), _digest(captions[row].encode())) for row in cut]
    return torch.tensor(digests, dtype=torch.int64).reshape(-1, 2)


def cut_notes(cut: pa.Table, captions: int) -> list[str]:
    """A note on captions that were cut, out of so many; none where none was."""
    if not len(cut):
        return []
    pairs = np.unique(np.stack([column.to_numpy() for column in cut.columns], axis=1), axis=0)
    _, together = np.unique(pairs[:, 0], return_counts=True)
    same = int(together[together > 1].sum())
    equal = f"; {same:,} different ones are the same to the model" if same else ""
    return [f"{len(cut):,} of {captions:,} captions are longer than the tokenizer's row and were cut{equal}"]


def _digest(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little", signed=True)
