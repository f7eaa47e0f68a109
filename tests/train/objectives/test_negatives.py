"""The negatives of ITM beside the single hardest: drawn by similarity, from the hardest few, and random ones."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fnpipe.mining.edges.labels import POSITIVE
from fnpipe.train.objectives.ecm import PLAIN, EcmConfig, ecm_decisions

# What 99.9 % of chi-square values stay below, by degrees of freedom.
CHI_SQUARE = {2: 13.82, 3: 16.27}


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


def albef_probabilities(sim: np.ndarray, recorded: np.ndarray, temp: float) -> np.ndarray:
    """ALBEF's weights of the negatives of every row: the softmax, without what is recorded."""
    weights = np.exp(sim / temp) / np.exp(sim / temp).sum(1, keepdims=True)
    weights[recorded] = 0
    return weights / weights.sum(1, keepdims=True)


def test_sampled_negatives_come_with_albefs_probabilities():
    size, temp, draws = 5, 0.3, 1200
    sim = torch.rand(size, size, generator=drawn(3))
    recorded = torch.eye(size, dtype=torch.bool)
    recorded[1, 3] = True
    config = EcmConfig(false_negatives="ignore", negatives="sampled")
    of_text, of_image = np.zeros((size, size)), np.zeros((size, size))
    for seed in range(draws):
        found = combinations(ecm_decisions(sim, None, recorded, config, drawn(seed), temp))[size:]
        for image, text, _ in found[:size]:
            of_text[text, image] += 1
        for image, text, _ in found[size:]:
            of_image[image, text] += 1
    for counts, table, known in ((of_image, sim, recorded), (of_text, sim.T, recorded.T)):
        expected = draws * albef_probabilities(table.double().numpy(), known.numpy(), temp)
        assert (counts[known.numpy()] == 0).all()
        for row in range(size):
            some = ~known[row].numpy()
            off = (counts[row, some] - expected[row, some]) ** 2 / expected[row, some]
            assert off.sum() < CHI_SQUARE[len(off) - 1]


@settings(max_examples=40)
@given(batches(), st.sampled_from(["positive", "drop", "ignore"]), st.integers(0, 99))
def test_a_sampled_negative_is_judged_as_the_hardest_one_is(batch, false_negatives, seed):
    """At a low temperature the draw is the hardest one wherever no two are equally similar."""
    sim, label, recorded = batch
    apart = sim + 1e-3 * torch.arange(sim.numel()).view_as(sim)
    kinds = {"false_negatives": false_negatives}
    hardest = ecm_decisions(apart, label, recorded, EcmConfig(**kinds))
    sampled = ecm_decisions(apart, label, recorded, EcmConfig(**kinds, negatives="sampled"), drawn(seed), 1e-6)
    assert combinations(sampled) == combinations(hardest)
    assert (sampled.positives_i2t == hardest.positives_i2t).all()
    # What is said of the hardest does not depend on what is drawn.
    warm = ecm_decisions(apart, label, recorded, EcmConfig(**kinds, negatives="sampled"), drawn(seed), 10.0)
    assert (warm.hardest_i2t == hardest.hardest_i2t).all()
    assert (warm.hardest_t2i == hardest.hardest_t2i).all()


def test_no_temperature_is_too_low_for_the_draw():
    sim = torch.tensor([[1.0, 0.0, -1.0], [0, 1, 0], [0, 0, 1]])
    config = EcmConfig(negatives="sampled")
    found = [combinations(ecm_decisions(sim, None, None, config, drawn(s), 1e-4))[3 + 3] for s in range(20)]
    assert set(found) == {(0, 1, 0)}
