"""Captions to token ids: the small vocabulary shipped for fnpipe-tiny, and open_clip's own tokenizers.

Whatever the vocabulary, a model of ours needs five facts that the libraries give in five ways or not at all: which ids
stand for padding, [CLS] (the first position), the end of text, and [MASK], and how long a caption is. ``pad_id`` may be
the id of a real word (CLIP pads with 0, which is "!"), so padding is known by length, never by its id.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from fnpipe.pipeline.errors import InputError

SPECIAL_TOKENS = ("[PAD]", "[CLS]", "[EOT]", "[MASK]")
TINY_VOCABULARY = Path(__file__).parent / "assets" / "fnpipe-tiny-vocabulary.json"


class CaptionTokenizer:
    """Turns captions into rows of ids: ``[CLS] pieces [EOT]``, then padding; longer captions lose their tail.

    Args:
        encode: captions -> one list of ids a caption, with its special tokens and without padding, of any length.
        context_length: most ids in a row; a row that is cut still ends with ``eot_id``.
        vocabulary_size: rows of the text tower's embedding.
        pad_id, cls_id, eot_id, mask_id: ``cls_id`` is None for a vocabulary without a token for the start.
            ``mask_id == vocabulary_size`` says that the vocabulary has no [MASK]: the model adds a row of its own.
        special_ids: never masked, and never drawn as a random replacement.
    """

    def __init__(
        self,
        encode: Callable[[Sequence[str]], list[list[int]]],
        *,
        context_length: int,
        vocabulary_size: int,
        pad_id: int,
        cls_id: int | None,
        eot_id: int,
        mask_id: int,
        special_ids: frozenset[int],
    ) -> None:
        self._encode = encode
        self.context_length = context_length
        self.vocabulary_size = vocabulary_size
        self.pad_id, self.cls_id, self.eot_id, self.mask_id = pad_id, cls_id, eot_id, mask_id
        self.special_ids = special_ids
        self.ordinary_ids = torch.tensor([i for i in range(vocabulary_size) if i not in special_ids])

    def __call__(self, captions: Sequence[str]) -> torch.Tensor:
        """(n, L) int64, L the longest of these captions (at least 1, at most ``context_length``)."""
        rows = [self._cut(ids) for ids in self._encode(captions)]
        out = torch.full((len(rows), max(map(len, rows), default=1)), self.pad_id, dtype=torch.int64)
        for i, ids in enumerate(rows):
            out[i, : len(ids)] = torch.tensor(ids)
        return out

    def _cut(self, ids: list[int]) -> list[int]:
        return ids if len(ids) <= self.context_length else [*ids[: self.context_length - 1], self.eot_id]

    def lengths(self, ids: torch.Tensor) -> torch.Tensor:
        """(n,) int64: ids of each row up to and including its first end of text; (n, L) in. L where there is none."""
        is_end = ids == self.eot_id
        return torch.where(is_end.any(1), is_end.int().argmax(1) + 1, ids.shape[1])


def tiny_tokenizer(context_length: int) -> CaptionTokenizer:
    """The shipped vocabulary: 1,000 lower-case byte-level pieces, so that any Unicode text has ids."""
    from tokenizers import Tokenizer

    pieces = Tokenizer.from_file(str(TINY_VOCABULARY))
    pad, cls, eot, mask = range(len(SPECIAL_TOKENS))
    # A caption that spells "[MASK]" is text like any other: it must not become a special id.
    pieces.encode_special_tokens = True

    def encode(captions: Sequence[str]) -> list[list[int]]:
        encodings = pieces.encode_batch(list(captions), add_special_tokens=False)
        return [[cls, *encoding.ids, eot] for encoding in encodings]

    return CaptionTokenizer(
        encode,
        context_length=context_length,
        vocabulary_size=pieces.get_vocab_size(),
        pad_id=pad,
        cls_id=cls,
        eot_id=eot,
        mask_id=mask,
        special_ids=frozenset((pad, cls, eot, mask)),
    )


def open_clip_tokenizer(architecture: str, context_length: int, vocabulary_size: int) -> CaptionTokenizer:
    """open_clip's tokenizer of an architecture; its vocabulary has no [MASK], so ``mask_id == vocabulary_size``.

    Raises:
        InputError: the tokenizer comes from the transformers package, which is missing or cannot load it.
    """
    import open_clip

    try:
        tokenizer = open_clip.get_tokenizer(architecture, context_length=context_length)
    except Exception as error:
        # Anything can go wrong between a missing package and a tokenizer that is neither cached nor reachable.
        raise InputError(
            f"{architecture}: its tokenizer needs the package transformers and its files: {error}"
        ) from error
    if isinstance(tokenizer, open_clip.SimpleTokenizer):
        return _clip_tokenizer(tokenizer, context_length, vocabulary_size)
    return _hf_tokenizer(tokenizer, context_length, vocabulary_size)


def _clip_tokenizer(tokenizer: object, context_length: int, vocabulary_size: int) -> CaptionTokenizer:
    """CLIP's byte pairs. Pads with 0, a real word ("!"), which may be masked and drawn like any other."""
    start, end = tokenizer.sot_token_id, tokenizer.eot_token_id  # type: ignore[attr-defined]

    def encode(captions: Sequence[str]) -> list[list[int]]:
        return [[start, *tokenizer.encode(caption), end] for caption in captions]  # type: ignore[attr-defined]

    return CaptionTokenizer(
        encode,
        context_length=context_length,
        vocabulary_size=vocabulary_size,
        pad_id=0,
        cls_id=start,
        eot_id=end,
        mask_id=vocabulary_size,
        special_ids=frozenset((start, end)),
    )


def _hf_tokenizer(tokenizer: object, context_length: int, vocabulary_size: int) -> CaptionTokenizer:
    """A tokenizer of the transformers package behind open_clip's wrapper (SigLIP's, for one)."""
    inner = tokenizer.tokenizer  # type: ignore[attr-defined]
    end = inner.eos_token_id if inner.eos_token_id is not None else inner.sep_token_id
    pad = inner.pad_token_id if inner.pad_token_id is not None else 0

    def encode(captions: Sequence[str]) -> list[list[int]]:
        cleaned = [tokenizer.clean_fn(caption) for caption in captions]  # type: ignore[attr-defined]
        rows: list[list[int]] = inner(cleaned, padding=False, truncation=False)["input_ids"]
        return [row if row and row[-1] == end else [*row, end] for row in rows]

    return CaptionTokenizer(
        encode,
        context_length=context_length,
        vocabulary_size=vocabulary_size,
        pad_id=pad,
        cls_id=inner.bos_token_id,
        eot_id=end,
        mask_id=vocabulary_size,
        special_ids=frozenset(i for i in (inner.bos_token_id, end, pad) if i is not None),
    )
