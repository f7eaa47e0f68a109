"""The objectives against hand-computed cases and a slow transcription of their definitions, in value and gradient."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.multiprocessing
from hypothesis import given, settings
from hypothesis import strategies as st

from fnpipe.mining.edges.labels import AMBIGUOUS, NEGATIVE, POSITIVE, UNSCORED
from fnpipe.pipeline.errors import InputError
from fnpipe.train.distributed import gather_rows
from fnpipe.train.objectives.contrastive import consistency_loss, itc_loss, itc_targets, sigmoid_itc_loss, sigmoid_loss
from fnpipe.train.objectives.ecm import PLAIN, EcmConfig, ecm_decisions
from fnpipe.train.objectives.matching import itm_loss, mlm_loss

# Asymmetric, so that swapped directions do not pass. Hardest text of each image: 1, 2, 0; hardest image of each
# text: 2, 0, 1. Second: texts 2, 0, 1 and images 1, 2, 0.
SIM = torch.tensor([[0.9, 0.6, 0.3], [0.2, 0.8, 0.7], [0.5, 0.1, 0.9]], dtype=torch.float64)


def judged(decisions):
    """The judged ITM rows, without the own pairs: the texts' rows, then the images'."""
    rows = zip(decisions.itm_images.tolist(), decisions.itm_texts.tolist(), decisions.itm_labels.tolist(), strict=True)
    return list(rows)[len(decisions.positives_i2t) :]


def scores(**given_scores):
    """(3, 3) labels by MAFA's thresholds, not judged but for ``i0t1=0.9``-like entries."""
    label = torch.full((3, 3), UNSCORED)
    for name, p in given_scores.items():
        label[int(name[1]), int(name[3])] = POSITIVE if p > 0.8 else NEGATIVE if p < 0.5 else AMBIGUOUS
    return label


# ------------------------------------------------------------------------------------------- hand-computed decisions
def test_without_scores_every_hardest_negative_has_label_0():
    decisions = ecm_decisions(SIM, None, None, EcmConfig())
    assert judged(decisions) == [(2, 0, 0), (0, 1, 0), (1, 2, 0), (0, 1, 0), (1, 2, 0), (2, 0, 0)]
    assert decisions.itm_labels[:3].tolist() == [1, 1, 1]
    assert decisions.itm_images[:3].tolist() == decisions.itm_texts[:3].tolist() == [0, 1, 2]
    assert decisions.mlm_images.tolist() == decisions.mlm_texts.tolist() == [0, 1, 2]
    assert torch.equal(itc_targets(decisions).i2t, torch.eye(3))
    assert {name: int(n) for name, n in decisions.counts.items()} == {
        "hardest": 6,
        "scored": 0,
        "positive": 0,
        "ambiguous": 0,
        "joined": 0,
    }


def test_a_new_positive_found_in_both_directions_counts_twice_in_itm_and_joins_mlm_once():
    decisions = ecm_decisions(SIM, scores(i0t1=0.81), None, EcmConfig())
    assert judged(decisions) == [(2, 0, 0), (0, 1, 1), (1, 2, 0), (0, 1, 1), (1, 2, 0), (2, 0, 0)]
    assert decisions.mlm_images.tolist() == [0, 1, 2, 0]
    assert decisions.mlm_texts.tolist() == [0, 1, 2, 1]
    targets = itc_targets(decisions)
    assert targets.i2t.tolist() == [[0.5, 0.5, 0], [0, 1, 0], [0, 0, 1]]
    assert targets.t2i.tolist() == [[1, 0, 0], [0.5, 0.5, 0], [0, 0, 1]]


def test_an_ambiguous_one_gives_its_place_to_the_second_hardest_and_changes_no_target():
    decisions = ecm_decisions(SIM, scores(i0t1=0.6), None, EcmConfig())
    assert judged(decisions) == [(2, 0, 0), (2, 1, 0), (1, 2, 0), (0, 2, 0), (1, 2, 0), (2, 0, 0)]
    assert torch.equal(itc_targets(decisions).i2t, torch.eye(3))
    assert len(decisions.mlm_images) == 3
    assert int(decisions.counts["ambiguous"]) == 2


def test_counts_are_over_both_directions():
    sim = torch.tensor([[0.9, 0.6, 0.3], [0.2, 0.8, 0.7], [0.5, 0.65, 0.9]])
    # Text 1 is the hardest of image 0, whose own hardest is image 2, and image 2 that of text 0, which has text 1.
    counts = ecm_decisions(sim, scores(i0t1=0.6, i2t0=0.9), None, EcmConfig()).counts
    assert {name: int(n) for name, n in counts.items()} == {
        "hardest": 6,
        "scored": 2,
        "positive": 1,
        "ambiguous": 1,
        "joined": 1,
    }


def test_drop_takes_a_false_negative_out_of_itm_and_of_its_rows_softmax():
    decisions = ecm_decisions(SIM, scores(i0t1=0.9), None, EcmConfig(false_negatives="drop"))
    assert judged(decisions)[3] == (0, 2, 0)
    assert judged(decisions)[1] == (2, 1, 0)
    assert decisions.dropped_i2t.nonzero().tolist() == [[0, 1]]
    assert decisions.dropped_t2i.nonzero().tolist() == [[1, 0]]
    targets = itc_targets(decisions, smoothing=0.5)
    assert targets.i2t[0].tolist() == [0.75, 0, 0.25]
    expected = -(0.75 * 0.9 + 0.25 * 0.3) + math.log(math.exp(0.9) + math.exp(0.3))
    alone = ecm_decisions(SIM, None, None, PLAIN)
    others = itc_loss(SIM, SIM.T, itc_targets(alone, smoothing=0.5, dtype=torch.float64))
    row = -(SIM[0].log_softmax(0) * itc_targets(alone, smoothing=0.5).i2t[0]).sum()
    column = -(SIM[:, 1].log_softmax(0) * itc_targets(alone, smoothing=0.5).t2i[1]).sum()
    dropped_column = -(0.75 * 0.8 + 0.25 * 0.1) + math.log(math.exp(0.8) + math.exp(0.1))
    got = itc_loss(SIM, SIM.T, itc_targets(decisions, smoothing=0.5, dtype=torch.float64))
    assert float(got) == pytest.approx(float(others) + (expected - float(row) + dropped_column - float(column)) / 6)


def test_ignore_is_plain_grit_whatever_the_scores():
    with_scores = ecm_decisions(SIM, scores(i0t1=0.9, i1t2=0.6), None, EcmConfig(false_negatives="ignore"))
    assert judged(with_scores) == judged(ecm_decisions(SIM, None, None, PLAIN))
    assert torch.equal(itc_targets(with_scores).i2t, torch.eye(3))
    assert int(with_scores.counts["positive"]) == 2


def test_unscored_next_takes_the_hardest_scored_one_and_coverage_speaks_of_the_hardest():
    p = scores(i0t2=0.9, i1t2=0.1)
    decisions = ecm_decisions(SIM, p, None, EcmConfig(unscored="next"))
    # Image 0 has text 2 scored alone: the new positive; text 2 has images 1 (0.7) and 0 (0.3) scored: the harder one.
    assert judged(decisions) == [(2, 0, 0), (0, 1, 0), (1, 2, 0), (0, 2, 1), (1, 2, 0), (2, 0, 0)]
    assert int(decisions.counts["scored"]) == 2  # (image 1, text 2), from either side
    assert decisions.hardest_i2t.tolist() == [1, 2, 0]


def test_second_is_label_0_whatever_its_probability_unless_known_positives_are_skipped():
    p = scores(i0t1=0.6, i0t2=0.95)
    assert judged(ecm_decisions(SIM, p, None, EcmConfig()))[3] == (0, 2, 0)
    rows = judged(ecm_decisions(SIM, p, None, EcmConfig(second="next-negative")))
    assert [row for row in rows[3:] if row[0] == 0] == []  # nothing is left for image 0
    assert len(rows) == 5


def test_recorded_pairs_are_no_negatives_and_share_the_rows_mass():
    recorded = torch.eye(3, dtype=torch.bool)
    recorded[0, 1] = True  # caption 1 is recorded for image 0 as well
    decisions = ecm_decisions(SIM, scores(i0t1=0.99, i1t2=0.9), recorded, EcmConfig())
    assert judged(decisions) == [(2, 0, 0), (2, 1, 0), (1, 2, 1), (0, 2, 0), (1, 2, 1), (2, 0, 0)]
    targets = itc_targets(decisions, recorded)
    assert targets.i2t.tolist() == [[0.5, 0.5, 0], [0, 0.5, 0.5], [0, 0, 1]]
    assert targets.t2i.tolist() == [[1, 0, 0], [0.5, 0.5, 0], [0, 0.5, 0.5]]


def test_one_pair_has_no_negatives_and_two_have_no_second():
    one = ecm_decisions(SIM[:1, :1], None, None, EcmConfig())
    assert (one.itm_labels.tolist(), one.hardest_i2t.tolist(), int(one.counts["hardest"])) == ([1], [-1], 0)
    assert float(itc_loss(SIM[:1, :1], SIM[:1, :1], itc_targets(one))) == 0
    two = ecm_decisions(SIM[:2, :2], scores(i0t1=0.6)[:2, :2], None, EcmConfig())
    assert judged(two) == [(1, 0, 0), (1, 0, 0)]  # the ambiguous (0, 1) has nothing to take its place


def test_equal_similarities_are_ordered_by_index():
    sim = torch.tensor([[1.0, 0.5, 0.5, 0.5], [0.5, 1, 0.5, 0.5], [0.5, 0.5, 1, 0.5], [0.5, 0.5, 0.5, 1]])
    p = torch.full((4, 4), AMBIGUOUS)
    assert judged(ecm_decisions(sim, None, None, PLAIN))[4:] == [(0, 1, 0), (1, 0, 0), (2, 0, 0), (3, 0, 0)]
    assert judged(ecm_decisions(sim, p, None, EcmConfig()))[4:] == [(0, 2, 0), (1, 2, 0), (2, 1, 0), (3, 1, 0)]


# ---------------------------------------------------------------------------------------------- hand-computed losses
def test_smoothed_targets_are_the_mixture_and_sum_to_one():
    targets = itc_targets(ecm_decisions(SIM, scores(i0t1=0.9), None, EcmConfig()), smoothing=0.5)
    sixth = 1 / 6
    np.testing.assert_allclose(targets.i2t[0], [0.25 + sixth, 0.25 + sixth, sixth], rtol=1e-6)
    np.testing.assert_allclose(targets.i2t[1], [sixth, 0.5 + sixth, sixth], rtol=1e-6)
    np.testing.assert_allclose(targets.t2i.sum(1), 1, rtol=1e-6)


def test_itc_of_two_pairs_by_hand():
    logits = torch.tensor([[2.0, 0.0], [1.0, 3.0]])
    targets = itc_targets(ecm_decisions(logits, None, None, PLAIN))
    i2t = (math.log(1 + math.exp(-2)) + math.log(1 + math.exp(-2))) / 2
    t2i = (math.log(1 + math.exp(-1)) + math.log(1 + math.exp(-3))) / 2
    assert float(itc_loss(logits, logits.T, targets)) == pytest.approx((i2t + t2i) / 2)


def test_consistency_is_the_cross_entropy_to_the_other_direction_and_moves_no_teacher():
    i2t, t2i = SIM.clone().requires_grad_(), SIM.T.clone().requires_grad_()
    consistency_loss(i2t, t2i).backward()
    q, r = SIM.softmax(1), SIM.T.softmax(1)
    expected = -(r * q.log()).sum(1).mean() / 2 - (q * r.log()).sum(1).mean() / 2
    assert float(consistency_loss(SIM, SIM.T)) == pytest.approx(float(expected))
    # d/dlogits of CE(r, softmax) is softmax - r; a gradient through the teacher would add to it.
    np.testing.assert_allclose(i2t.grad, (q - r) / 6, atol=1e-12)
    np.testing.assert_allclose(t2i.grad, (r - q) / 6, atol=1e-12)


@settings(max_examples=30)
@given(n=st.integers(1, 6), seed=st.integers(0, 1000))
def test_the_sigmoid_loss_is_binary_cross_entropy_of_every_combination_asked(n: int, seed: int):
    rng = np.random.default_rng(seed)
    logits, asked = torch.from_numpy(4 * rng.normal(size=(n, n))), torch.from_numpy(rng.random((n, n)) < 0.7)
    positive = torch.eye(n, dtype=torch.bool) | torch.from_numpy(rng.random((n, n)) < 0.3)
    each = torch.nn.functional.binary_cross_entropy_with_logits(logits, positive.double(), reduction="none")
    torch.testing.assert_close(sigmoid_loss(logits, positive), each.sum() / n)
    torch.testing.assert_close(sigmoid_loss(logits, positive, asked), each[asked].sum() / n)


def test_sigmoid_loss_labels_mined_positives_plus_one():
    temp, bias = torch.tensor(0.1, dtype=torch.float64), torch.tensor(-1.0, dtype=torch.float64)
    decisions = ecm_decisions(SIM, scores(i0t1=0.9), None, EcmConfig())
    total = 0.0
    for i in range(3):
        for j in range(3):
            z = 1 if i == j or (i, j) == (0, 1) else -1
            total += math.log(1 + math.exp(-z * (float(SIM[i, j]) / 0.1 - 1)))
    assert float(sigmoid_itc_loss(SIM, temp, bias, decisions)) == pytest.approx(total / 3)
    dropped = ecm_decisions(SIM, scores(i0t1=0.9), None, EcmConfig(false_negatives="drop"))
    left_out = math.log(1 + math.exp(-(0.6 / 0.1 - 1)))
    assert float(sigmoid_itc_loss(SIM, temp, bias, dropped)) == pytest.approx((total - left_out) / 3)


def test_sigmoid_loss_heeds_what_either_direction_finds_and_what_is_recorded():
    sim = torch.tensor([[0.9, 0.6, 0.3], [0.2, 0.8, 0.7], [0.5, 0.65, 0.9]], dtype=torch.float64)
    # Image 0 finds text 1, whose own hardest is image 2; text 0 finds image 2, whose own hardest is text 1.
    p, one = scores(i0t1=0.9, i2t0=0.9), torch.tensor(1.0, dtype=torch.float64)
    recorded = torch.eye(3, dtype=torch.bool)
    recorded[1, 0] = True
    # softplus(-z) of a positive and softplus(z) of a negative, at temperature 1 without a bias.
    positive = {(0, 0), (1, 1), (2, 2), (1, 0), (0, 1), (2, 0)}
    terms = {
        (i, j): math.log(1 + math.exp(float(-sim[i, j] if (i, j) in positive else sim[i, j])))
        for i in range(3)
        for j in range(3)
    }
    decisions = ecm_decisions(sim, p, recorded, EcmConfig())
    assert (decisions.positives_i2t.nonzero().tolist(), decisions.positives_t2i.nonzero().tolist()) == (
        [[0, 1]],
        [[0, 2]],
    )
    loss = sigmoid_itc_loss(sim, one, one * 0, decisions, recorded)
    assert float(loss) == pytest.approx(sum(terms.values()) / 3)
    dropped = ecm_decisions(sim, p, recorded, EcmConfig(false_negatives="drop"))
    loss = sigmoid_itc_loss(sim, one, one * 0, dropped, recorded)
    assert float(loss) == pytest.approx((sum(terms.values()) - terms[0, 1] - terms[2, 0]) / 3)


def test_matching_and_token_losses_of_half_precision_logits_are_computed_in_float32():
    logits = (torch.randn(300, 2, generator=torch.Generator().manual_seed(0)) * 4).bfloat16()
    labels = torch.arange(300) % 2
    exact = torch.nn.functional.cross_entropy(logits.double(), labels)
    for loss in (itm_loss(logits, labels), mlm_loss(logits, labels)):
        assert loss.dtype == torch.float32
        assert float(loss) == pytest.approx(float(exact), rel=1e-6)


def test_itm_and_mlm_are_mean_cross_entropies_and_mlm_of_nothing_is_0():
    logits = torch.tensor([[0.0, 1.0], [2.0, 0.0]])
    expected = (math.log(1 + math.exp(-1)) + math.log(1 + math.exp(-2))) / 2
    assert float(itm_loss(logits, torch.tensor([1, 0]))) == pytest.approx(expected)
    assert float(mlm_loss(logits, torch.tensor([1, 0]))) == pytest.approx(expected)
    empty = torch.zeros(0, 2, requires_grad=True)
    loss = mlm_loss(empty, torch.zeros(0, dtype=torch.int64))
    loss.backward()
    assert float(loss.detach()) == 0


@pytest.mark.parametrize("wrong", [{"false_negatives": "dropped"}, {"unscored": "x"}, {"second": ""}])
def test_config_refuses_what_it_does_not_know(wrong: dict):
    with pytest.raises(InputError):
        EcmConfig(**wrong)


# ------------------------------------------------------------------------------------------- slow transcription
def row_verdict(sim, label, candidates, config):
    """One anchor, in the words of the definition: (ITM's choice and label, new positive, dropped one)."""
    ranking = sorted(candidates, key=lambda k: (-sim[k], k))
    if config.unscored == "next":
        ranking = [k for k in ranking if label[k] != UNSCORED] + [k for k in ranking if label[k] == UNSCORED]
    if not ranking:
        return None, None, None
    first, rest = ranking[0], ranking[1:]
    if config.second == "next-negative":
        rest = [k for k in rest if label[k] != POSITIVE]
    second = (rest[0], 0) if rest else None
    if config.false_negatives == "ignore" or label[first] in (UNSCORED, NEGATIVE):
        return (first, 0), None, None
    if label[first] == AMBIGUOUS:
        return second, None, None
    if config.false_negatives == "drop":
        return second, None, first
    return (first, 1), first, None


def losses_by_loop(sim, label, recorded, temp, config, smoothing, itm_table, mlm_table):
    """L_ITC + L_ITM + L_MLM over a batch, one row at a time; the tables stand for what a network would say."""
    size, order = len(sim), sim.detach().tolist()
    itc, joined = 0.0, []
    verdicts = {}
    for t in range(size):  # texts as anchors, then images
        candidates = [i for i in range(size) if not recorded[i][t]]
        column = [order[i][t] for i in range(size)]
        verdicts["t2i", t] = row_verdict(column, [label[i][t] for i in range(size)], candidates, config)
    for i in range(size):
        candidates = [t for t in range(size) if not recorded[i][t]]
        verdicts["i2t", i] = row_verdict(order[i], label[i], candidates, config)
    for (direction, anchor), (_, positive, dropped) in verdicts.items():
        row = sim[anchor] if direction == "i2t" else sim[:, anchor]
        known = {k for k in range(size) if (recorded[anchor][k] if direction == "i2t" else recorded[k][anchor])}
        if positive is not None:
            known.add(positive)
            pair = (anchor, positive) if direction == "i2t" else (positive, anchor)
            if pair not in joined:
                joined.append(pair)
        columns = [k for k in range(size) if k != dropped]
        norm = torch.logsumexp(torch.stack([row[k] / temp for k in columns]), 0)
        for k in columns:
            target = (1 - smoothing) * (1 / len(known) if k in known else 0) + smoothing / len(columns)
            itc = itc - target * (row[k] / temp - norm) / (2 * size)
    itm = [(k, k, 1) for k in range(size)]
    for (direction, anchor), (choice, _, _) in verdicts.items():
        if choice is not None:
            other, label = choice
            itm.append((anchor, other, label) if direction == "i2t" else (other, anchor, label))
    l_itm = sum(torch.logsumexp(itm_table[i, t], 0) - itm_table[i, t, label] for i, t, label in itm) / len(itm)
    mlm = [(k, k) for k in range(size)] + joined
    l_mlm = sum(torch.logsumexp(mlm_table[i, t], 0) - mlm_table[i, t, 0] for i, t in mlm) / len(mlm)
    return itc + l_itm + l_mlm


def losses_by_batch(sim, label, recorded, temp, config, smoothing, itm_table, mlm_table):
    decisions = ecm_decisions(sim, label, recorded, config)
    targets = itc_targets(decisions, recorded, smoothing=smoothing, dtype=sim.dtype)
    mlm_logits = mlm_table[decisions.mlm_images, decisions.mlm_texts]
    return (
        itc_loss(sim / temp, sim.T / temp, targets)
        + itm_loss(itm_table[decisions.itm_images, decisions.itm_texts], decisions.itm_labels)
        + mlm_loss(mlm_logits, torch.zeros(len(mlm_logits), dtype=torch.int64))
    )


@st.composite
def batches(draw):
    """Embeddings with duplicated captions, every label, and other pairs of the same image."""
    size = draw(st.integers(1, 7))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    images, texts = rng.normal(size=(size, 4)), rng.normal(size=(size, 4))
    caption = rng.integers(0, size, size) if draw(st.booleans()) else np.arange(size)
    texts = texts[caption]
    same_image = rng.integers(0, max(1, size - 1), size) if draw(st.booleans()) else np.arange(size)
    recorded = (same_image[:, None] == same_image) | ((caption[:, None] == caption) & draw(st.booleans()))
    recorded = recorded & draw(st.booleans()) | np.eye(size, dtype=bool)
    label = rng.choice([UNSCORED, NEGATIVE, AMBIGUOUS, POSITIVE], size=(size, size), p=[0.3, 0.2, 0.3, 0.2])
    config = EcmConfig(
        false_negatives=draw(st.sampled_from(["positive", "drop", "ignore"])),
        unscored=draw(st.sampled_from(["negative", "next"])),
        second=draw(st.sampled_from(["plain", "next-negative"])),
    )
    tables = rng.normal(size=(size, size, 2)), rng.normal(size=(size, size, 5))
    return SimpleNamespace(
        images=images,
        texts=texts,
        recorded=recorded,
        label=label,
        config=config,
        smoothing=draw(st.sampled_from([0.0, 0.1, 0.5, 1.0])),
        tables=tables,
    )


@settings(max_examples=150)
@given(batches())
def test_losses_and_gradients_equal_the_slow_transcription(batch):
    results = []
    for losses, label, recorded in (
        (losses_by_batch, torch.tensor(batch.label), torch.tensor(batch.recorded)),
        (losses_by_loop, batch.label.tolist(), batch.recorded.tolist()),
    ):
        leaves = [
            torch.tensor(x, requires_grad=True) for x in (batch.images, batch.texts, np.float64(0.07), *batch.tables)
        ]
        images, texts, temp, itm_table, mlm_table = leaves
        # Multiplied element by element: a matrix product may give equal captions unequal last bits.
        sim = (images[:, None] * texts).sum(2)
        loss = losses(sim, label, recorded, temp, batch.config, batch.smoothing, itm_table, mlm_table)
        results.append((loss, torch.autograd.grad(loss, leaves)))
    (fast, fast_grads), (slow, slow_grads) = results
    assert abs(float((fast - slow).detach())) < 1e-6
    for a, b in zip(fast_grads, slow_grads, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


@settings(max_examples=50)
@given(batches())
def test_no_recorded_pair_is_ever_a_negative_and_targets_are_distributions(batch):
    recorded = torch.tensor(batch.recorded)
    decisions = ecm_decisions(
        torch.tensor(batch.images @ batch.texts.T), torch.tensor(batch.label), recorded, batch.config
    )
    negatives = decisions.itm_labels == 0
    assert not recorded[decisions.itm_images[negatives], decisions.itm_texts[negatives]].any()
    targets = itc_targets(decisions, recorded, smoothing=batch.smoothing)
    for target, dropped in ((targets.i2t, targets.dropped_i2t), (targets.t2i, targets.dropped_t2i)):
        np.testing.assert_allclose(target.sum(1), 1, rtol=1e-5)
        assert not target[dropped].any()


# ------------------------------------------------------------------------------------------- two processes
def gathered_loss(features, rank, world, recorded=None):
    """Mean-over-rows ITC of one process's rows against all columns; gradient of its own features."""
    size = len(features) // world
    own = features[rank * size : (rank + 1) * size].clone().requires_grad_()
    image, text = own[:, 0], own[:, 1]
    all_images, all_texts = gather_rows(image), gather_rows(text)
    rows, across = slice(rank * size, (rank + 1) * size), None
    if recorded is not None:
        across = recorded[rows], recorded.T[rows]
    decisions = ecm_decisions(image.detach() @ text.detach().T, None, None, PLAIN)
    targets = itc_targets(decisions, smoothing=0.3, rank=rank, world=world, across=across, dtype=features.dtype)
    loss = itc_loss(image @ all_texts.T / 0.07, text @ all_images.T / 0.07, targets)
    loss.backward()
    return loss.detach(), own.grad


def in_process(rank, features, address, results, recorded):
    torch.distributed.init_process_group("gloo", init_method=f"file://{address}", rank=rank, world_size=2)
    results[rank] = [gathered_loss(features, rank, 2, known) for known in recorded]
    torch.distributed.destroy_process_group()


def copies_across_processes():
    """Pair 1 has the picture of pair 4 and the caption of pair 5; rows are images."""
    recorded = torch.eye(6, dtype=torch.bool)
    recorded[1, 4] = recorded[4, 1] = recorded[1, 5] = True
    return recorded


def test_gathered_itc_of_two_processes_equals_one_with_the_joint_batch(tmp_path):
    """Without copies and with them, in the same two processes: starting them is what takes its time."""
    features = torch.randn(6, 2, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    recorded = (None, copies_across_processes())
    with torch.multiprocessing.Manager() as manager:
        results = manager.dict()
        torch.multiprocessing.spawn(in_process, (features, tmp_path / "meet", results, recorded), nprocs=2)
        first, second = results[0], results[1]
    for known, (loss_0, grad_0), (loss_1, grad_1) in zip(recorded, first, second, strict=True):
        joint_loss, joint_grad = gathered_loss(features, 0, 1, known)
        assert float(loss_0 + loss_1) / 2 == pytest.approx(float(joint_loss), abs=1e-12)
        # What DDP does: the mean over the processes of every parameter's gradient.
        np.testing.assert_allclose(torch.cat([grad_0, grad_1]) / 2, joint_grad, atol=1e-12)
