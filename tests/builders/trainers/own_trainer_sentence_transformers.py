"""The sentence-transformers part of docs/guide/own-trainer.md over a tiny CLIP: ``PAGE WORK``.

Prints how many steps were trained, which pairs each had, how far the page's loss without edges lies from the package's
own in value and gradients, and what the edges change.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import torch
from sentence_transformers.losses import MultipleNegativesRankingLoss
from train_sentence_transformers import tiny_clip


def value_and_gradients(loss, model, batch):
    features = [model.preprocess([row[column] for row in batch]) for column in ("image", "caption")]
    model.zero_grad()
    value = loss(features, torch.tensor([row["label"] for row in batch]))
    value.backward()
    return value.item(), [p.grad.clone() for p in model.parameters() if p.grad is not None]


def main(page: str, work: str) -> None:
    section = Path(page).read_text().partition("## sentence-transformers")[2]
    (code,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    code = code.replace("clip-ViT-B-32", tiny_clip(Path(work) / "model"))
    code = code.replace('output_dir="out"', 'output_dir="out", use_cpu=True, save_strategy="no", disable_tqdm=True')
    seen: list[list[int]] = []
    scope: dict[str, Any] = {}
    before, call, after = code.partition("trainer.train()")
    exec(compile(before, page, "exec"), scope)
    noting = scope["loss"].loss.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(kwargs["pair_ids"].tolist()), with_kwargs=True
    )
    exec(compile(call + after, page, "exec"), scope)
    noting.remove()
    # In double: the gradients of a model are sums of many terms.
    model = scope["model"].double()
    both = {"directions": ("query_to_doc", "doc_to_query"), "partition_mode": "per_direction"}
    theirs, gradients = value_and_gradients(MultipleNegativesRankingLoss(model, **both), model, scope["rows"])
    ours, ours_gradients = value_and_gradients(scope["MinedRankingLoss"](model, None), model, scope["rows"])
    apart = max(float((a - b).abs().max()) for a, b in zip(gradients, ours_gradients, strict=True))
    mined, _ = value_and_gradients(scope["loss"], model, scope["rows"])
    steps = scope["trainer"].state.global_step
    print(json.dumps({"steps": steps, "seen": seen, "apart": [abs(ours - theirs), apart], "mined": mined - ours}))


if __name__ == "__main__":
    main(*sys.argv[1:])
