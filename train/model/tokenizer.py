"""Captions to token ids: the small vocabulary shipped for fnpipe-tiny, and open_clip's own tokenizers.

Whatever the vocabulary, a model of ours needs five facts that the libraries give in five ways or not at all: which ids
stand for padding, [CLS] (the first position), the end of text, and [MASK], and how long a caption is. ``pad_id`` may be
the id of a real word (CLIP pads with 0, which is "!"), so padding is known by length, never by its id.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from fnpipe.pipeline.errors import InputError, one_line
from fnpipe.pipeline.files import atomic
from fnpipe.pipeline.machine import hub

SPECIAL_TOKENS = ("[PAD]", "[CLS]", "[EOT]", "[MASK]")
TINY_VOCABULARY = Path(__file__).parents[1] / "assets" / "fnpipe-tiny-vocabulary.json"


class CaptionTokenizer:
    """Turns captions into rows of ids: ``[CLS] pieces [EOT]``, then padding; longer captions lose their tail.

    Args:
        encode: captions -> one list of ids a caption, special tokens included, padding not, of any length; picklable.
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

    def is_cut(self, captions: Sequence[str]) -> list[bool]:
        """Whether each caption has more ids than a row."""
        return [len(ids) > self.context_length for ids in self._encode(captions)] if captions else []

    @property
    def starts_alike(self) -> bool:
        """Whether `write_tokenizer` can pad with the end of text, behind a first id that is always the same."""
        return self.cls_id is not None and not isinstance(self._encode, _HfPieces)

    def _cut(self, ids: list[int]) -> list[int]:
        return ids if len(ids) <= self.context_length else [*ids[: self.context_length - 1], self.eot_id]

    def lengths(self, ids: torch.Tensor) -> torch.Tensor:
        """(n,) int64: ids of each row up to and including its first end of text; (n, L) in. L where there is none."""
        is_end = ids == self.eot_id
        return torch.where(is_end.any(1), is_end.int().argmax(1) + 1, ids.shape[1])


def tiny_tokenizer(context_length: int) -> CaptionTokenizer:
    """The shipped vocabulary: 1,000 lower-case byte-level pieces, so that any Unicode text has ids."""
    pad, cls, eot, mask = range(len(SPECIAL_TOKENS))
    encode = _TinyPieces()
    return CaptionTokenizer(
        encode,
        context_length=context_length,
        vocabulary_size=encode.pieces.get_vocab_size(),
        pad_id=pad,
        cls_id=cls,
        eot_id=eot,
        mask_id=mask,
        special_ids=frozenset((pad, cls, eot, mask)),
    )


class _TinyPieces:
    """`tiny_tokenizer`'s captions to ids; a class, like its two fellows below, so that loader processes can have it."""

    def __init__(self) -> None:
        from tokenizers import Tokenizer

        self.pieces = Tokenizer.from_file(str(TINY_VOCABULARY))
        # A caption that spells "[MASK]" is text like any other: it must not become a special id.
        self.pieces.encode_special_tokens = True

    def __reduce__(self) -> tuple[type[_TinyPieces], tuple[()]]:
        return _TinyPieces, ()

    def __call__(self, captions: Sequence[str]) -> list[list[int]]:
        encodings = self.pieces.encode_batch(list(captions), add_special_tokens=False)
        return [[1, *encoding.ids, 2] for encoding in encodings]


def open_clip_tokenizer(architecture: str, context_length: int, vocabulary_size: int) -> CaptionTokenizer:
    """open_clip's tokenizer of an architecture; its vocabulary has no [MASK], so ``mask_id == vocabulary_size``.

    Raises:
        InputError: the tokenizer comes from the transformers package, which is missing or cannot load it.
    """
    import open_clip

    settings = (open_clip.get_model_config(architecture) or {}).get("text_cfg", {})
    try:
        with hub.or_cache("hf_tokenizer_name" in settings):
            tokenizer = open_clip.get_tokenizer(architecture, context_length=context_length)
    except Exception as error:
        # Anything can go wrong between a missing package and a tokenizer that is neither cached nor reachable.
        reason = f"they are {error}" if isinstance(error, hub.NotCached) else one_line(error)
        raise InputError(
            f"{architecture}: its tokenizer needs the package transformers and its files: {reason}"
        ) from error
    if isinstance(tokenizer, open_clip.SimpleTokenizer):
        return _clip_tokenizer(tokenizer, context_length, vocabulary_size)
    return _hf_tokenizer(tokenizer, context_length, vocabulary_size)


def _clip_tokenizer(tokenizer: Any, context_length: int, vocabulary_size: int) -> CaptionTokenizer:
    """CLIP's byte pairs. Pads with 0, a real word ("!"), which may be masked and drawn like any other."""
    start, end = tokenizer.sot_token_id, tokenizer.eot_token_id
    return CaptionTokenizer(
        _ClipPieces(tokenizer),
        context_length=context_length,
        vocabulary_size=vocabulary_size,
        pad_id=0,
        cls_id=start,
        eot_id=end,
        mask_id=vocabulary_size,
        special_ids=frozenset((start, end)),
    )


class _ClipPieces:
    # open_clip reads these words of a caption as the tokens themselves, in any case; apart they are plain words.
    _CONTROL = re.compile(r"<(start_of_text|end_of_text)>", re.IGNORECASE)

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def __call__(self, captions: Sequence[str]) -> list[list[int]]:
        start, end = self.tokenizer.sot_token_id, self.tokenizer.eot_token_id
        plain = [self._CONTROL.sub(r"< \1 >", caption) for caption in captions]
        return [[start, *self.tokenizer.encode(caption), end] for caption in plain]


def _hf_tokenizer(tokenizer: Any, context_length: int, vocabulary_size: int) -> CaptionTokenizer:
    """A tokenizer of the transformers package behind open_clip's wrapper (SigLIP's, for one)."""
    inner = tokenizer.tokenizer
    end = inner.eos_token_id if inner.eos_token_id is not None else inner.sep_token_id
    pad = inner.pad_token_id if inner.pad_token_id is not None else 0
    return CaptionTokenizer(
        _HfPieces(tokenizer, end),
        context_length=context_length,
        vocabulary_size=vocabulary_size,
        pad_id=pad,
        cls_id=inner.bos_token_id,
        eot_id=end,
        mask_id=vocabulary_size,
        special_ids=frozenset(i for i in (inner.bos_token_id, end, pad) if i is not None),
    )


class _HfPieces:
    def __init__(self, tokenizer: Any, end: int) -> None:
        self.tokenizer, self.end = tokenizer, end

    def __call__(self, captions: Sequence[str]) -> list[list[int]]:
        cleaned = [self.tokenizer.clean_fn(caption) for caption in captions]
        rows: list[list[int]] = self.tokenizer.tokenizer(cleaned, padding=False, truncation=False)["input_ids"]
        return [row if row and row[-1] == self.end else [*row, self.end] for row in rows]


# ---------------------------------------------------------------------------------------------------- for open_clip
def write_tokenizer(tokenizer: CaptionTokenizer, directory: Path, *, pad_with_end: bool = False) -> dict[str, Any]:
    """Write what ``open_clip.get_tokenizer("local-dir:...")`` needs to read captions as ``tokenizer`` does.

    Args:
        pad_with_end: pad with the end of text; not for tokenizers of the transformers package.

    Returns:
        What the ``text_cfg`` of open_clip's configuration says about it, beside what the architecture's says already;
        nothing where open_clip's default tokenizer is the one.
    """
    encode = tokenizer._encode
    if isinstance(encode, _HfPieces):
        encode.tokenizer.save_pretrained(directory)
        return {}
    if isinstance(encode, _ClipPieces):
        if not pad_with_end:
            return {}
        pieces, clean = _clip_as_pieces(encode.tokenizer), "lower"
        special = {"pad": "<end_of_text>", "cls": "<start_of_text>", "eos": "<end_of_text>"}
    else:
        assert isinstance(encode, _TinyPieces)
        pieces, clean = _TinyPieces().pieces, "whitespace"
        special = {"pad": "[EOT]" if pad_with_end else "[PAD]", "cls": "[CLS]", "eos": "[EOT]"}
    _write_pieces(pieces, special, directory)
    # Any name will do: beside a local configuration open_clip reads the tokenizer from that directory.
    return {"hf_tokenizer_name": "local", "tokenizer_kwargs": {"clean": clean}}


def _write_pieces(pieces: Any, special: dict[str, str], directory: Path) -> None:
    """``tokenizer.json`` and the settings under which transformers wraps it, which need no transformers to write."""
    from tokenizers.processors import TemplateProcessing

    start, end = special["cls"], special["eos"]
    ids = [(token, pieces.token_to_id(token)) for token in (start, end)]
    pieces.post_processor = TemplateProcessing(single=f"{start} $A {end}", special_tokens=ids)
    pieces.save(str(directory / "tokenizer.json"))
    settings: dict[str, Any] = {f"{name}_token": token for name, token in special.items()}
    # A caption that spells out a special token stays text.
    settings |= {"tokenizer_class": "PreTrainedTokenizerFast", "split_special_tokens": True}
    atomic.write_json(directory / "tokenizer_config.json", settings)


def _clip_as_pieces(clip: Any) -> Any:
    """open_clip's ``SimpleTokenizer`` as a tokenizer of the tokenizers package, for captions that it has cleaned."""
    from tokenizers import AddedToken, Regex, Tokenizer
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split

    pieces = Tokenizer(BPE(clip.encoder, list(clip.bpe_ranks), end_of_word_suffix="</w>"))
    words = Split(Regex(r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"), "removed", invert=True)
    pieces.pre_tokenizer = Sequence([words, ByteLevel(add_prefix_space=False, use_regex=False)])
    special = [clip.decoder[i] for i in clip.all_special_ids]
    pieces.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    return pieces
