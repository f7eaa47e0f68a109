"""Captions to ids, by the shipped vocabulary and by CLIP's."""

from __future__ import annotations

from types import SimpleNamespace

import open_clip
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fnpipe.pipeline.errors import InputError
from fnpipe.train.model.tokenizer import SPECIAL_TOKENS, TINY_VOCABULARY, open_clip_tokenizer, tiny_tokenizer

TINY = tiny_tokenizer(32)
GRAMMAR = (
    "red crimson green blue azure yellow purple violet orange white black dark circle disc square box triangle "
    "cross plus diamond bar stripe small tiny little big large grey teal pink brown beige navy olive sky left "
    "right top bottom above over below under beside side scene with picture drawing image of in at on and a the"
)


def test_special_ids_are_fixed():
    assert SPECIAL_TOKENS == ("[PAD]", "[CLS]", "[EOT]", "[MASK]")
    assert (TINY.pad_id, TINY.cls_id, TINY.eot_id, TINY.mask_id) == (0, 1, 2, 3)
    assert TINY.vocabulary_size == 1000
    assert TINY_VOCABULARY.stat().st_size < 100_000


def test_a_word_of_the_drawn_scenes_is_one_piece_wherever_it_stands():
    for word in GRAMMAR.split():
        assert TINY([f"{word} {word}"]).shape == (1, 4), word
        assert len(TINY([f"{word} {word}"]).unique()) == 3, word


@given(st.lists(st.text(), min_size=1, max_size=4))
def test_any_text_has_ids_within_the_vocabulary_and_the_context(captions: list[str]):
    ids = TINY(captions)
    lengths = TINY.lengths(ids)
    assert ids.shape[1] == int(lengths.max()) <= 32
    for row, length in zip(ids.tolist(), lengths.tolist(), strict=True):
        assert row[0] == 1
        assert row[length - 1] == 2
        assert row[length:] == [0] * (len(row) - length)
        assert all(4 <= piece < 1000 for piece in row[1 : length - 1])


def test_different_words_of_any_script_differ():
    ids = TINY(["日本", "日木", "é", "e"])
    assert len({tuple(row) for row in ids.tolist()}) == 4


def test_case_and_unicode_form_do_not_matter():
    assert torch.equal(TINY(["Café RED"]), TINY(["cafe\u0301 red"]))


def test_a_caption_that_spells_a_special_token_is_text():
    assert not set(TINY(["[MASK] [PAD] [EOT]"])[0, 1:-1].tolist()) & {0, 1, 2, 3}


def test_a_long_caption_keeps_its_head_and_its_end():
    long, short = TINY(["red box " * 50])[0], TINY(["red box"])[0]
    assert len(long) == 32
    assert long[-1] == 2
    assert long[1:3].tolist() == short[1:3].tolist()


def test_a_transformers_tokenizer_is_read_through_open_clips_wrapper(monkeypatch: pytest.MonkeyPatch):
    class Words:
        """SigLIP's conventions: no token for the start, and padding with the end of text."""

        bos_token_id, eos_token_id, pad_token_id = None, 1, 1

        def __call__(self, captions, padding, truncation):
            assert (padding, truncation) == (False, False)
            return {"input_ids": [[2 + len(word) for word in caption.split()] + [1] for caption in captions]}

    wrapper = SimpleNamespace(tokenizer=Words(), clean_fn=str.strip)
    monkeypatch.setattr(open_clip, "get_tokenizer", lambda name, context_length: wrapper)
    tokenizer = open_clip_tokenizer("some-siglip", 4, 50)
    ids = tokenizer([" a bb ccc dddd", "a"])
    assert ids.tolist() == [[3, 4, 5, 1], [3, 1, 1, 1]]
    assert tokenizer.lengths(ids).tolist() == [4, 2]
    assert (tokenizer.cls_id, tokenizer.eot_id, tokenizer.mask_id) == (None, 1, 50)


def test_a_tokenizer_that_cannot_be_had_is_one_line(monkeypatch: pytest.MonkeyPatch):
    def missing(name, context_length):
        raise ImportError("no transformers\nat all")

    monkeypatch.setattr(open_clip, "get_tokenizer", missing)
    with pytest.raises(InputError, match="some-siglip: its tokenizer needs the package transformers") as caught:
        open_clip_tokenizer("some-siglip", 64, 32000)
    assert "\n" not in str(caught.value)


def test_clip_pads_with_a_real_word_so_lengths_come_from_the_end_of_text():
    tokenizer = open_clip_tokenizer("ViT-B-32", 77, 49408)
    captions = ["hi ! !", "a photo of a dog", "x " * 100]
    ids, reference = tokenizer(captions), open_clip.get_tokenizer("ViT-B-32")(captions)
    assert torch.equal(ids, reference[:, : ids.shape[1]])
    assert tokenizer.lengths(ids).tolist() == [5, 7, 77]
    assert tokenizer.lengths(ids).tolist() == (reference.argmax(1) + 1).tolist()
    assert tokenizer(["!%"])[0, 1] == tokenizer.pad_id == 0
    assert tokenizer.mask_id == 49408
