"""The negatives of ITM beside the single hardest: drawn from the hardest few, and random ones."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fnpipe.mining.edges.labels import POSITIVE
from fnpipe.train.objectives.ecm import PLAIN, EcmConfig, ecm_decisions


def drawn(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def combinations(decisions) -> list[tuple[int, int, int]]:
    columns = (decisions.itm_images, decisions.itm_texts, decisions.itm_labels)
    return list(zip(*(column.tolist() for column in columns), strict=True))


@st.composite
def batches(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Similarities with ties, labels, and what is recorded beside the diagonal, of a batch."""
    size, generator = draw(st.integers(1, 7)), drawn(draw(st.integers(0, 1000)))
    sim = torch.randint(-3, 4, (size, size), generator=generator).float()
    label = torch.randint(-1, 3, (size, size), generator=generator)
    recorded = torch.rand(size, size, generator=generator) < 0.2
    return sim, label, recorded | torch.eye(size, dtype=torch.bool)


@settings(max_examples=60)
@given(batches(), st.integers(0, 4), st.sampled_from(["positive", "drop", "ignore"]), st.integers(0, 99))
def test_easy_negatives_follow_what_is_there_without_them(batch, easy, false_negatives, seed):
    sim, label, recorded = batch
    plain = ecm_decisions(sim, label, recorded, EcmConfig(false_negatives=false_negatives))
    config = EcmConfig(false_negatives=false_negatives, easy=easy)
    found = ecm_decisions(sim, label, recorded, config, drawn(seed))
    before, after = combinations(plain), combinations(found)
    assert after[: len(before)] == before
    assert (found.positives_i2t == plain.positives_i2t).all()
    added = after[len(before) :]
    assert all(answer == 0 for _, _, answer in added)

    def allowed(image: int, text: int) -> bool:
        return not recorded[image, text] and (false_negatives == "ignore" or label[image, text] != POSITIVE)

    size = len(sim)
    of_text = [min(easy, sum(allowed(i, t) for i in range(size))) for t in range(size)]
    of_image = [min(easy, sum(allowed(i, t) for t in range(size))) for i in range(size)]
    cut = sum(of_text)
    assert len(added) == cut + sum(of_image)
    assert all(allowed(image, text) for image, text, _ in added)
    for part, counts, side in ((added[:cut], of_text, 1), (added[cut:], of_image, 0)):
        assert [sum(one[side] == row for one in part) for row in range(size)] == counts
        # As many different ones.
        assert len(set(part)) == len(part)


@settings(max_examples=60)
@given(batches(), st.integers(2, 5), st.integers(0, 99))
def test_the_negative_that_is_judged_is_one_of_the_hardest_few(batch, top, seed):
    sim, _, recorded = batch
    found = ecm_decisions(sim, None, recorded, EcmConfig(top=top), drawn(seed))
    size = len(sim)
    for image, text, answer in combinations(found)[size:]:
        assert answer == 0
        assert not recorded[image, text]
    by_text = [(i, t) for i, t, _ in combinations(found)[size:]][
        : sum(bool((~recorded[:, t]).any()) for t in range(size))
    ]
    for image, text in by_text:
        harder = [i for i in range(size) if not recorded[i, text] and (-sim[i, text], i) < (-sim[image, text], image)]
        assert len(harder) < top
    # What is said of the hardest does not depend on what is drawn.
    assert (found.hardest_i2t == ecm_decisions(sim, None, recorded, PLAIN).hardest_i2t).all()


def test_the_hardest_few_are_drawn_evenly_and_a_drawn_positive_is_one():
    sim = torch.tensor([[9.0, 3, 2, 1], [0, 9, 0, 0], [0, 0, 9, 0], [0, 0, 0, 9]])
    label = torch.full((4, 4), -1)
    label[0, 2] = POSITIVE
    chosen = []
    for seed in range(300):
        found = ecm_decisions(sim, label, None, EcmConfig(top=3), drawn(seed))
        image, text, answer = combinations(found)[4 + 4]
        assert image == 0
        assert answer == int(text == 2) == int(found.positives_i2t[0].any())
        chosen.append(text)
    assert all(80 < chosen.count(text) < 120 for text in (1, 2, 3))
