"""A training step against its own combinations, computed one at a time, in value and gradient."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from test_objectives import losses_by_loop

from fnpipe.mining.edges.labels import AMBIGUOUS, NEGATIVE, POSITIVE, UNSCORED
from fnpipe.train.model.build import build_model
from fnpipe.train.model.config import ModelConfig
from fnpipe.train.model.model import VLModel
from fnpipe.train.objectives.ecm import PLAIN, EcmConfig
from fnpipe.train.objectives.masking import IGNORED, mask_tokens
from fnpipe.train.objectives.step import StepConfig, StepInput, TrainStep, mask_generator

SIZE = 5
CAPTIONS = [
    "a red ball",
    "two dogs run over a green field",
    "a cup",
    "a small blue square and a ring",
    "snow on a roof",
]
PLAIN_STEP = StepConfig(itm=True, mlm=True, ecm=PLAIN, mask_rate=0.5, consistency=0.0, dtype=None)


@pytest.fixture(scope="module")
def model() -> VLModel:
    torch.manual_seed(0)
    model = build_model(ModelConfig()).eval()
    with torch.no_grad():
        # As built, the matching head and the masked-token head hardly tell anything apart.
        model.itm_head.weight.mul_(50)
        model.mlm_bias.normal_(generator=torch.Generator().manual_seed(1))
    return model


@pytest.fixture(scope="module")
def batch(model: VLModel) -> StepInput:
    """Five pairs of which two show the same image, with every label."""
    draw = torch.Generator().manual_seed(2)
    pixels = torch.randint(0, 256, (SIZE, 3, model.image_size, model.image_size), generator=draw, dtype=torch.uint8)
    recorded = torch.eye(SIZE, dtype=torch.bool)
    recorded[0, 3] = recorded[3, 0] = True
    label = torch.tensor(np.random.default_rng(5).choice([UNSCORED, NEGATIVE, AMBIGUOUS, POSITIVE], (SIZE, SIZE)))
    return StepInput(pixels, model.tokenizer(CAPTIONS), recorded, label)


def embeddings_one_at_a_time(model: VLModel, batch: StepInput) -> tuple[torch.Tensor, torch.Tensor, list, list]:
    pixels = [model.transform.normalise(batch.pixels[i : i + 1]) for i in range(SIZE)]
    images = [model.encode_image(one) for one in pixels]
    texts = [model.encode_text(batch.ids[t : t + 1]) for t in range(SIZE)]
    image, text = torch.cat([e for _, e in images]), torch.cat([e for _, e in texts])
    return image, text, [model.image_keys(tokens) for tokens, _ in images], [tokens for tokens, _ in texts]


def fused_alone(model: VLModel, tokens: torch.Tensor, ids: torch.Tensor, keys: list[torch.Tensor]) -> torch.Tensor:
    """One text with one image, the padding cut off instead of masked."""
    length = int(model.tokenizer.lengths(ids[None])[0])
    row = torch.zeros(1, dtype=torch.int64)
    return model.fuse(tokens[:, :length], torch.ones(1, length, dtype=torch.bool), keys, row)


def expected_losses(
    model: VLModel, batch: StepInput, config: StepConfig, smoothing: float, mlm_pairs: list[tuple[int, int]]
) -> dict[str, torch.Tensor]:
    image, text, keys, tokens = embeddings_one_at_a_time(model, batch)
    # Element by element, so that no two entries are summed in another order.
    sim = (image[:, None] * text).sum(2)
    label, recorded = batch.label.tolist(), batch.recorded.tolist()
    itm_table = torch.stack([
        torch.stack([model.itm_logits(fused_alone(model, tokens[t], batch.ids[t], keys[i]))[0] for t in range(SIZE)])
        for i in range(SIZE)
    ])  # fmt: skip
    nothing = torch.zeros(SIZE, SIZE, 1)
    itc = losses_by_loop(sim, label, recorded, model.temp, config.ecm, smoothing, torch.zeros(SIZE, SIZE, 2), nothing)
    both = losses_by_loop(sim, label, recorded, model.temp, config.ecm, smoothing, itm_table, nothing)
    # A table of equal logits costs ln 2 for every combination.
    losses = {"itc": itc - np.log(2), "itm": both - itc + np.log(2)}
    if config.consistency:
        q, r = (sim / model.temp).log_softmax(1), (sim.T / model.temp).log_softmax(1)
        cross = -(r.detach().exp() * q).sum(1).mean() - (q.detach().exp() * r).sum(1).mean()
        losses["consistency"] = config.consistency * cross / 2
    ids, labels = mask_tokens(batch.ids[[t for _, t in mlm_pairs]], model.tokenizer, mask_generator(7, 1, 2), 0.5)
    said = []
    for row, (i, t) in enumerate(mlm_pairs):
        fused = fused_alone(model, model.text_tokens(ids[row : row + 1]), batch.ids[t], keys[i])[0]
        hidden = torch.nonzero(labels[row] != IGNORED)[:, 0].tolist()
        said += [F.cross_entropy(model.mlm_logits(fused[at]), labels[row, at]) for at in hidden]
    losses["mlm"] = torch.stack(said).mean()
    return losses


def gradients(model: VLModel, loss: torch.Tensor) -> list[torch.Tensor]:
    trained = [p for p in model.parameters() if p.requires_grad]
    found = torch.autograd.grad(loss, trained, allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(trained, found, strict=True)]


@pytest.mark.parametrize(
    ("ecm", "smoothing", "consistency"),
    [
        (PLAIN, 0.0, 0.2),
        (EcmConfig(), 0.3, 0.0),
        (EcmConfig(false_negatives="drop", unscored="next"), 0.0, 0.0),
    ],
)
def test_losses_and_gradients_are_those_of_the_combinations_one_at_a_time(
    model: VLModel, batch: StepInput, ecm: EcmConfig, smoothing: float, consistency: float
):
    config = replace(PLAIN_STEP, ecm=ecm, consistency=consistency)
    total, losses, decisions = TrainStep(model, config)(batch, smoothing, mask_generator(7, 1, 2))
    mlm_pairs = list(zip(decisions.mlm_images.tolist(), decisions.mlm_texts.tolist(), strict=True))
    if ecm.false_negatives == "positive":
        assert any(i != t for i, t in mlm_pairs), "or MLM's images and texts are not told apart"
    expected = expected_losses(model, batch, config, smoothing, mlm_pairs)
    assert losses.keys() == expected.keys()
    for name, loss in losses.items():
        assert not loss.requires_grad
        assert float(loss) == pytest.approx(float(expected[name].detach()), abs=2e-5), name
    for ours, theirs in zip(gradients(model, total), gradients(model, sum(expected.values())), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-4 * max(1.0, float(theirs.abs().max())))


def test_itc_alone_is_the_same_itc(model: VLModel, batch: StepInput):
    _, losses, _ = TrainStep(model, PLAIN_STEP)(batch, 0.0, mask_generator(0, 0, 0))
    total, alone, _ = TrainStep(model, replace(PLAIN_STEP, itm=False, mlm=False))(batch, 0.0, mask_generator(0, 0, 0))
    assert list(alone) == ["itc"]
    assert float(alone["itc"]) == pytest.approx(float(losses["itc"]), abs=1e-6)
    assert float(total.detach()) == float(alone["itc"])


def test_a_model_with_a_bias_learns_by_the_sigmoid_loss(model: VLModel, batch: StepInput):
    torch.manual_seed(0)
    sigmoid = build_model(ModelConfig(itc_loss="sigmoid")).eval()
    _, losses, decisions = TrainStep(sigmoid, replace(PLAIN_STEP, ecm=EcmConfig()))(batch, 0.5, mask_generator(0, 0, 0))
    image, text, _, _ = embeddings_one_at_a_time(sigmoid, batch)
    mined = set(zip(decisions.mlm_images.tolist(), decisions.mlm_texts.tolist(), strict=True))
    expected = 0.0
    for i in range(SIZE):
        for t in range(SIZE):
            sign = 1 if batch.recorded[i, t] or (i, t) in mined else -1
            logit = (image[i] * text[t]).sum() / sigmoid.temp + sigmoid.bias
            expected += float(F.softplus(-sign * logit).detach()) / SIZE
    assert len(mined) > SIZE
    assert float(losses["itc"]) == pytest.approx(expected, rel=1e-5)


def test_masks_follow_from_seed_epoch_and_batch_alone():
    def drawn(*numbers: int) -> list[float]:
        return torch.rand(4, generator=mask_generator(*numbers)).tolist()

    assert drawn(1, 2, 3) == drawn(1, 2, 3)
    assert len({tuple(drawn(*numbers)) for numbers in [(1, 2, 3), (0, 2, 3), (1, 0, 3), (1, 2, 0), (3, 2, 1)]}) == 5


@pytest.mark.parametrize("smoothing", [0.0, 0.5])
def test_stopped_columns_give_the_gradient_of_the_released_code(model: VLModel, batch: StepInput, smoothing: float):
    """GRIT-VLP's and MAFA's code compares every row with columns that have no gradient, own pairs alone as targets."""
    drawn = torch.Generator().manual_seed(7)
    rows = [F.normalize(torch.randn(SIZE, 8, generator=drawn, dtype=torch.float64), dim=1) for _ in range(2)]
    alone = replace(batch, recorded=torch.eye(SIZE, dtype=torch.bool), label=None)
    temp = float(model.temp)

    def gradients(loss: torch.Tensor, leaves: list[torch.Tensor]) -> list[torch.Tensor]:
        return [gradient.double() for gradient in torch.autograd.grad(loss, leaves)]

    def ours(columns: bool) -> tuple[float, list[torch.Tensor]]:
        step = TrainStep(model, replace(PLAIN_STEP, stop_columns=columns))
        images, texts = (row.clone().requires_grad_() for row in rows)
        losses = step._contrast(images, texts, alone, smoothing, torch.Generator())[1]
        return float(losses["itc"]), gradients(losses["itc"], [images, texts])

    images, texts = (row.clone().requires_grad_() for row in rows)
    sim_i2t, sim_t2i = images @ texts.detach().T / temp, texts @ images.detach().T / temp
    targets = torch.zeros(SIZE, SIZE, dtype=torch.float64).fill_diagonal_(1)
    targets = (1 - smoothing) * targets + smoothing / SIZE
    i2t = -(F.log_softmax(sim_i2t, dim=1) * targets).sum(dim=1).mean()
    t2i = -(F.log_softmax(sim_t2i, dim=1) * targets).sum(dim=1).mean()
    expected = (i2t + t2i) / 2
    value, found = ours(columns=True)
    assert value == pytest.approx(float(expected), abs=1e-12)
    for mine, theirs in zip(found, gradients(expected, [images, texts]), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)
    both_value, both = ours(columns=False)
    assert both_value == pytest.approx(value, abs=1e-12)
    assert float((both[0] - found[0]).abs().max()) > 1e-3
