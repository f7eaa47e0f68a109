"""The loss for other loops: equal to open_clip's without edges, to our own step with MAFA's rule, else to a loop."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from open_clip.loss import ClipLoss

from fnpipe.mining.edges.labels import AMBIGUOUS, NEGATIVE, POSITIVE, UNSCORED
from fnpipe.mining.edges.lookup import EdgeLookup
from fnpipe.train.objectives.clip_loss import MinedClipLoss
from fnpipe.train.objectives.contrastive import itc_loss, itc_targets
from fnpipe.train.objectives.ecm import EcmConfig, ecm_decisions

PAIRS = 40  # two of each image


def a_batch(seed: int, size: int):
    """(B, 2, 5) unit features, and ids of which an image may stand twice."""
    rng = np.random.default_rng(seed)
    features = torch.nn.functional.normalize(torch.from_numpy(rng.normal(size=(size, 2, 5))), dim=2)
    pair_ids = torch.from_numpy(rng.choice(PAIRS, size, replace=False))
    return features, pair_ids // 2, pair_ids


def some_edges(seed: int):
    """A random label, or none, of every combination that is not recorded; with the table that says it."""
    table = np.random.default_rng(seed).choice([UNSCORED, NEGATIVE, AMBIGUOUS, POSITIVE], size=(PAIRS // 2, PAIRS))
    table[np.arange(PAIRS) // 2, np.arange(PAIRS)] = UNSCORED
    image_ids, pair_ids = np.nonzero(table != UNSCORED)
    labels = table[image_ids, pair_ids].astype(np.int8)
    return EdgeLookup(PAIRS, image_ids * PAIRS + pair_ids, (labels / 2).astype(np.float32), labels), table


def value_and_gradients(loss, features, **given):
    """The loss of a batch and its gradients by features and scale."""
    leaves = [features.clone().requires_grad_(), torch.tensor(9.0, dtype=features.dtype, requires_grad=True)]
    value = loss(leaves[0][:, 0], leaves[0][:, 1], leaves[1], output_dict=True, **given)["contrastive_loss"]
    return value.detach(), torch.autograd.grad(value, leaves)


def assert_equal(a, b, atol=1e-6):
    assert float(a[0]) == pytest.approx(float(b[0]), abs=atol)
    for one, other in zip(a[1], b[1], strict=True):
        np.testing.assert_allclose(one, other, atol=atol)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bias", [None, -3.0])
def test_without_edges_it_is_open_clip_s(dtype, bias):
    features = a_batch(0, 7)[0].to(dtype)
    given = {} if bias is None else {"logit_bias": torch.tensor(bias)}
    assert_equal(*(value_and_gradients(kind(), features, **given) for kind in (MinedClipLoss, ClipLoss)))
    # And with the ids of a batch that holds no image twice.
    ids = torch.arange(0, 14, 2)
    ours = value_and_gradients(MinedClipLoss(), features, image_ids=ids // 2, pair_ids=ids)
    assert_equal(ours, value_and_gradients(ClipLoss(), features))


def loss_by_loop(features, image_ids, pair_ids, table, scale, smoothing):
    """Both directions, row by row: a row's mass goes evenly to what is known to match it."""
    total, size = 0.0, len(features)
    for side in (0, 1):
        for row in range(size):
            logits = [scale * (features[row, side] * features[k, 1 - side]).sum() for k in range(size)]
            known = []
            for k in range(size):
                image, text = (row, k) if side == 0 else (k, row)
                if image_ids[row] == image_ids[k] or table[image_ids[image], pair_ids[text]] == POSITIVE:
                    known.append(k)
            norm = torch.logsumexp(torch.stack(logits), 0)
            for k in range(size):
                target = (1 - smoothing) * (k in known) / len(known) + smoothing / size
                total = total - target * (logits[k] - norm) / (2 * size)
    return total


@settings(max_examples=25)
@given(seed=st.integers(0, 2**32 - 1), size=st.integers(1, 7), smoothing=st.sampled_from([0.0, 0.3, 1.0]))
def test_every_known_match_of_the_batch_is_a_target(seed, size, smoothing):
    features, image_ids, pair_ids = a_batch(seed, size)
    edges, table = some_edges(seed)
    loss = MinedClipLoss(edges=edges, smoothing=smoothing)
    ours = value_and_gradients(loss, features, image_ids=image_ids, pair_ids=pair_ids)

    def slow(image_features, text_features, scale, output_dict):
        both = torch.stack([image_features, text_features], 1)
        return {"contrastive_loss": loss_by_loop(both, image_ids, pair_ids, table, scale, smoothing)}

    assert_equal(ours, value_and_gradients(slow, features))


@pytest.mark.parametrize("false_negatives", ["positive", "drop"])
def test_with_mafa_s_rule_it_is_the_loss_that_training_here_has(false_negatives):
    features, image_ids, pair_ids = a_batch(3, 8)
    edges, _ = some_edges(3)
    config = EcmConfig(false_negatives=false_negatives)
    loss = MinedClipLoss(edges=edges, ecm=config, smoothing=0.2)
    ours = value_and_gradients(loss, features, image_ids=image_ids, pair_ids=pair_ids)

    def trained_here(image_features, text_features, scale, output_dict):
        sim = image_features @ text_features.T
        label, recorded = edges.block(image_ids, pair_ids)[1], image_ids[:, None] == image_ids
        decisions = ecm_decisions(sim, label, recorded, config)
        assert decisions.counts["positive"] >= 2
        targets = itc_targets(decisions, recorded, smoothing=0.2, dtype=sim.dtype)
        return {"contrastive_loss": itc_loss(sim * scale, sim.T * scale, targets)}

    assert_equal(ours, value_and_gradients(trained_here, features))


def test_ids_that_were_said_ahead_hold_for_one_call():
    features, image_ids, pair_ids = a_batch(1, 6)
    loss = MinedClipLoss(edges=some_edges(1)[0])
    given = value_and_gradients(loss, features, image_ids=image_ids, pair_ids=pair_ids)
    loss.expect(image_ids, pair_ids)
    assert_equal(value_and_gradients(loss, features), given, 0)
    with pytest.raises(ValueError, match="edges are looked up by ids"):
        value_and_gradients(loss, features)
    loss.expect(image_ids, pair_ids)
    with pytest.raises(ValueError, match="ids of 6 rows for 3"):
        value_and_gradients(loss, features[:3])


def test_a_share_beyond_1_is_refused():
    with pytest.raises(ValueError, match=r"smoothing is 1\.5"):
        MinedClipLoss(smoothing=1.5)


# ------------------------------------------------------------------------------------------- two processes
FORMS = [{"local_loss": local, "gather_with_grad": grad} for local in (False, True) for grad in (False, True)]
JOINT = a_batch(5, 8)
# Forked before autograd has threads; the one import serves both.
TWO = """
import os, sys
from test_clip_loss import in_process
second = os.fork()
in_process(0 if second else 1, sys.argv[1])
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(second, 0)[1]) if second else 0)
"""


def in_process(rank: int, folder: str):
    """Every form of gathering: what open_clip's loss gives, and ours without edges, with them, and by MAFA's rule."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    features, image_ids, pair_ids = (x[4 * rank : 4 * rank + 4] for x in JOINT)
    ids = {"image_ids": image_ids, "pair_ids": pair_ids}
    edges, here = some_edges(5)[0], {"rank": rank, "world_size": 2}
    found = []
    for form in FORMS:
        open_clip_s = value_and_gradients(ClipLoss(**form, **here), features)
        plain = value_and_gradients(MinedClipLoss(**form, **here), features)
        mined = value_and_gradients(MinedClipLoss(**form, **here, edges=edges, smoothing=0.1), features, **ids)
        found.append((open_clip_s, plain, mined))
    ecm = value_and_gradients(MinedClipLoss(**here, edges=edges, ecm=EcmConfig()), features, **ids)
    torch.save((found, ecm), f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


def test_two_processes_gather_as_open_clip_s_and_know_each_other_s_connections(tmp_path: Path):
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", TWO, str(tmp_path)], env={**os.environ, "PYTHONPATH": path}, capture_output=True
    )
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    (first, ecm), (second, _) = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    features, *ids = JOINT
    given = dict(zip(("image_ids", "pair_ids"), ids, strict=True))
    joint = value_and_gradients(MinedClipLoss(edges=some_edges(5)[0], smoothing=0.1), features, **given)
    for form, *both in zip(FORMS, first, second, strict=True):
        for open_clip_s, plain, _ in both:
            assert_equal(plain, open_clip_s)
        values, gradients = zip(*(mined for _, _, mined in both), strict=True)
        assert float(sum(values)) / 2 == pytest.approx(float(joint[0]), abs=1e-6)
        if form["gather_with_grad"]:
            # What DDP does: the mean over the processes of every gradient.
            np.testing.assert_allclose(torch.cat([g[0] for g in gradients]) / 2, joint[1][0], atol=1e-6)
    judged = value_and_gradients(MinedClipLoss(edges=some_edges(5)[0], ecm=EcmConfig()), features, **given)
    assert float(ecm[0]) == pytest.approx(float(judged[0]), abs=1e-6)
