"""Momentum distillation against ALBEF's own procedure, written out row by row with a ring of earlier embeddings."""

from __future__ import annotations

import copy
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from test_step import CAPTIONS, PLAIN_STEP, SIZE

from fnpipe.train.distributed import World
from fnpipe.train.model.build import build_model
from fnpipe.train.model.config import ModelConfig
from fnpipe.train.model.model import VLModel
from fnpipe.train.objectives.contrastive import itc_loss, itc_targets, taught
from fnpipe.train.objectives.ecm import PLAIN, ecm_decisions
from fnpipe.train.objectives.masking import IGNORED, mask_tokens
from fnpipe.train.objectives.matching import mlm_loss
from fnpipe.train.objectives.momentum import MOMENTUM, Queue, Teacher, follow
from fnpipe.train.objectives.step import StepInput, TrainStep, mask_generator

WIDTH, TEMP = 4, 0.2
ALONE = World(0, 1, torch.device("cpu"))


def unit(rng: np.random.Generator, rows: int) -> torch.Tensor:
    return F.normalize(torch.tensor(rng.standard_normal((rows, WIDTH))), dim=1)


def albef_itc(
    own: torch.Tensor, own_taught: torch.Tensor, other_taught: torch.Tensor, ring: torch.Tensor, alpha: float
) -> torch.Tensor:
    """One direction of ALBEF's ITC with distillation, row by row: columns are the teacher's batch and then the ring."""
    columns = [*other_taught, *ring]
    loss = torch.zeros((), dtype=torch.float64)
    for row in range(len(own)):
        logits = torch.stack([own[row] @ column / TEMP for column in columns])
        teacher = torch.stack([own_taught[row] @ column / TEMP for column in columns])
        log_p, q = logits - logits.logsumexp(0), (teacher - teacher.logsumexp(0)).exp()
        for column in range(len(columns)):
            target = alpha * q[column] + (1 - alpha) * float(column == row)
            loss = loss - target * log_p[column] / len(own)
    return loss


@given(seed=st.integers(0, 10**6), size=st.integers(1, 4), steps=st.integers(1, 5), alpha=st.floats(0, 1))
def test_itc_is_albefs_over_several_batches(seed: int, size: int, steps: int, alpha: float) -> None:
    rng = np.random.default_rng(seed)
    # ALBEF's ring holds a whole number of batches, and writes over the oldest.
    capacity = 2 * size
    rings: list[list[torch.Tensor]] = [[], []]
    teacher: Any = SimpleNamespace(size=capacity, queue=Queue.empty(WIDTH, torch.device("cpu")))
    for step in range(steps):
        images, texts = (unit(rng, size).requires_grad_() for _ in range(2))
        teacher.images, teacher.texts = unit(rng, size), unit(rng, size)
        ids = np.arange(step * size, (step + 1) * size)
        columns = Teacher.columns(teacher)
        recorded = torch.eye(size, size + len(teacher.queue), dtype=torch.bool)
        decisions = ecm_decisions(images @ texts.T, None, None, PLAIN)
        targets = itc_targets(decisions, across=(recorded, recorded), dtype=torch.float64)
        said = teacher.images @ columns[0].T / TEMP, teacher.texts @ columns[1].T / TEMP
        logits = images @ columns[0].T / TEMP, texts @ columns[1].T / TEMP
        ours = itc_loss(*logits, taught(targets, *said, alpha))
        i2t = albef_itc(images, teacher.images, teacher.texts, torch.stack(rings[1]) if step else texts[:0], alpha)
        t2i = albef_itc(texts, teacher.texts, teacher.images, torch.stack(rings[0]) if step else texts[:0], alpha)
        theirs = (i2t + t2i) / 2
        assert float(ours.detach()) == pytest.approx(float(theirs.detach()), abs=1e-12)
        for mine, other in zip(
            torch.autograd.grad(ours, (images, texts)), torch.autograd.grad(theirs, (images, texts)), strict=True
        ):
            torch.testing.assert_close(mine, other, atol=1e-12, rtol=0)
        Teacher.remember(teacher, SimpleNamespace(image_ids=ids, pair_ids=ids), ALONE)  # type: ignore[arg-type]
        for ring, rows in zip(rings, (teacher.images, teacher.texts), strict=True):
            if len(ring) < capacity:
                ring.extend(rows)
            else:
                start = step * size % capacity
                ring[start : start + size] = list(rows)
        assert teacher.queue.image_ids.tolist() == list(range(max(0, (step + 1) * size - capacity), (step + 1) * size))


def test_mlm_learns_from_the_teachers_words_too() -> None:
    draw = torch.Generator().manual_seed(0)
    logits, said = torch.randn(6, 9, generator=draw), torch.randn(6, 9, generator=draw).softmax(1)
    labels = torch.tensor([1, 0, 8, 3, 3, 2])
    distilled = -sum((said[k] * logits[k].log_softmax(0)).sum() for k in range(6)) / 6
    expected = 0.7 * mlm_loss(logits, labels) + 0.3 * distilled
    torch.testing.assert_close(mlm_loss(logits, labels, said, 0.3), expected)
    assert mlm_loss(logits[:0], labels[:0], said[:0], 0.3) == 0


@pytest.fixture(scope="module")
def models() -> tuple[VLModel, VLModel]:
    """A model, and another one that teaches it."""
    torch.manual_seed(0)
    own, other = (build_model(ModelConfig()).eval() for _ in range(2))
    return own, other


def batch_of(model: VLModel, across: torch.Tensor) -> StepInput:
    draw = torch.Generator().manual_seed(2)
    pixels = torch.randint(0, 256, (SIZE, 3, model.image_size, model.image_size), generator=draw, dtype=torch.uint8)
    return StepInput(pixels, model.tokenizer(CAPTIONS), torch.eye(SIZE, dtype=torch.bool), None, (across, across))


def test_a_step_compares_with_the_teacher_and_what_is_recorded_in_its_queue_is_no_negative(
    models: tuple[VLModel, VLModel],
) -> None:
    model, other = models
    teacher = Teacher(other, 8)
    rng = np.random.default_rng(3)
    earlier = [F.normalize(torch.tensor(rng.standard_normal((3, model.embed_dim)), dtype=torch.float32)) for _ in "it"]
    ids = torch.arange(3)
    teacher.queue, teacher.alpha = Queue(*earlier, ids, ids), 0.4
    across = torch.eye(SIZE, SIZE + 3, dtype=torch.bool)
    across[2, SIZE + 1] = True
    batch = batch_of(model, across)
    _, losses, decisions = TrainStep(model, PLAIN_STEP, teacher)(batch, 0.0, mask_generator(7, 1, 2))

    pixels = model.transform.normalise(batch.pixels)
    embeddings = [(m.encode_image(pixels)[1], m.encode_text(batch.ids)[1]) for m in (model, other)]
    (images, texts), (taught_images, taught_texts) = embeddings
    target = across.float() / across.sum(1, keepdim=True)
    expected = torch.zeros(())
    for rows, said, columns in (
        (images, taught_images, torch.cat([taught_texts, earlier[1]])),
        (texts, taught_texts, torch.cat([taught_images, earlier[0]])),
    ):
        mixed = 0.6 * target + 0.4 * (said @ columns.T / model.temp).softmax(1)
        expected = expected - (mixed * (rows @ columns.T / model.temp).log_softmax(1)).sum(1).mean() / 2
    assert float(losses["itc"]) == pytest.approx(float(expected.detach()), abs=1e-5)

    ids, labels = mask_tokens(batch.ids, model.tokenizer, mask_generator(7, 1, 2), 0.5)
    hidden, mask, rows = labels != IGNORED, model.text_mask(batch.ids), torch.arange(SIZE)
    logits = [
        m.mlm_logits(m.fuse(m.text_tokens(ids), mask, m.image_keys(m.encode_image(pixels)[0]), rows)[hidden])
        for m in (model, other)
    ]
    by_label = F.cross_entropy(logits[0], labels[hidden])
    by_teacher = -(logits[1].softmax(1) * logits[0].log_softmax(1)).sum(1).mean()
    assert float(losses["mlm"]) == pytest.approx(float((0.6 * by_label + 0.4 * by_teacher).detach()), abs=1e-4)
    # The teacher changes neither what is asked of the matching head nor what that loss is.
    _, plain, same = TrainStep(model, PLAIN_STEP)(replace(batch, across=None), 0.0, mask_generator(7, 1, 2))
    assert torch.equal(decisions.itm_texts, same.itm_texts)
    assert losses["itm"] == plain["itm"]


def test_the_copy_follows_slowly_and_is_never_trained(models: tuple[VLModel, VLModel]) -> None:
    model, other = models
    teacher, before = Teacher(model, 0), copy.deepcopy(model.state_dict())
    follow(teacher.model, other, MOMENTUM)
    for name, tensor in teacher.model.named_parameters():
        expected = 0.995 * before[name] + 0.005 * other.state_dict()[name]
        torch.testing.assert_close(tensor.detach(), expected, atol=1e-6, rtol=1e-5)
    assert not any(p.requires_grad for p in teacher.model.parameters())
    step = TrainStep(model, PLAIN_STEP, teacher)
    assert len(list(step.parameters())) == len(list(model.parameters())), "DDP and the optimiser see the model alone"
    assert step.state_dict().keys() == TrainStep(model, PLAIN_STEP).state_dict().keys()
