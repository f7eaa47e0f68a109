"""BLIP's image-text matching head as a discriminator: ``blip:MODEL``.

transformers' own forward pass encodes the picture and projects its tokens to keys and values again for every
combination. Here the vision tower runs once per picture, and the projections once per picture and scoring call; per
combination only the text layers run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from fnpipe.pipeline.errors import InputError, one_line
from fnpipe.pipeline.files.digests import digest_weights
from fnpipe.pipeline.machine import hub
from fnpipe.pipeline.machine.device import dtype_of, pick_device, pick_precision

# Keys and values of a picture are large (42 MB in BLIP base at 384 px, fp32): so many pictures hold them at a time.
IMAGES_AT_ONCE = 16
PAIRS_AT_ONCE = 128
VISION_BATCH = 16


class BlipDiscriminator:
    """transformers' ``BlipForImageTextRetrieval``, its ITM head's softmax. Made by `load_blip`."""

    def __init__(self, model: Any, image_processor: Any, tokenizer: Any, description: dict[str, Any]) -> None:
        self.description = description
        self._model = model
        self._process = image_processor
        self._tokenize = tokenizer
        self._device = next(model.parameters()).device
        self._dtype = next(model.parameters()).dtype
        self._max_tokens = min(512, int(model.config.text_config.max_position_embeddings))

    @torch.inference_mode()
    def prepare_images(self, rgbs: Sequence[np.ndarray], /) -> torch.Tensor:
        """(n, tokens, width): the vision tower's last hidden states."""
        parts = []
        for first in range(0, len(rgbs), VISION_BATCH):
            pictures = list(rgbs[first : first + VISION_BATCH])
            # Said, not guessed: a picture three pixels high looks like channels first.
            batch = self._process(images=pictures, return_tensors="pt", input_data_format="channels_last")
            pixels = batch["pixel_values"].to(self._device, self._dtype)
            parts.append(self._model.vision_model(pixel_values=pixels).last_hidden_state)
        return torch.cat(parts)

    def prepare_texts(self, captions: Sequence[str], /) -> list[list[int]]:
        """Token ids of every caption, not padded: every layer looks at the picture, so that no more can be shared."""
        encoded = self._tokenize(list(captions), truncation=True, max_length=self._max_tokens)
        return encoded["input_ids"]

    @torch.inference_mode()
    def score_pairs(
        self, images: torch.Tensor, image_rows: np.ndarray, texts: list[list[int]], text_rows: np.ndarray, /
    ) -> np.ndarray:
        out = np.empty(len(image_rows), np.float32)
        lengths = np.array([len(ids) for ids in texts])
        for rows, pairs in _by_images(image_rows):
            keys = self._keys_and_values(images[torch.from_numpy(rows)])
            pairs = pairs[np.argsort(lengths[text_rows[pairs]], kind="stable")]
            local = np.searchsorted(rows, image_rows[pairs])
            for first in range(0, len(pairs), PAIRS_AT_ONCE):
                cut = slice(first, first + PAIRS_AT_ONCE)
                logits = self._logits([texts[row] for row in text_rows[pairs[cut]]], keys, torch.from_numpy(local[cut]))
                out[pairs[cut]] = logits.float().softmax(-1)[:, 1].cpu().numpy()
        return out

    def _keys_and_values(self, image_tokens: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Per text layer, (n, heads, tokens, head width) keys and values of the pictures."""
        out = []
        for layer in self._model.text_encoder.encoder.layer:
            attention = layer.crossattention.self
            out.append(
                (_heads(attention.key(image_tokens), attention), _heads(attention.value(image_tokens), attention))
            )
        return out

    def _logits(
        self, texts: list[list[int]], keys: list[tuple[torch.Tensor, torch.Tensor]], image_rows: torch.Tensor
    ) -> torch.Tensor:
        """(n, 2) logits of combinations of texts with pictures ``image_rows`` of ``keys``."""
        lengths = torch.tensor([len(ids) for ids in texts])
        width = int(lengths.max())
        # What stands under the mask does not matter; 0 is a valid id.
        ids = torch.tensor([[*ids, *[0] * (width - len(ids))] for ids in texts], device=self._device)
        mask = (torch.arange(width) < lengths[:, None]).to(self._device)[:, None, None, :]
        image_rows = image_rows.to(self._device)
        hidden = self._model.text_encoder.embeddings(input_ids=ids)
        for layer, (key, value) in zip(self._model.text_encoder.encoder.layer, keys, strict=True):
            attention = layer.attention.self
            query = _heads(attention.query(hidden), attention)
            own = (_heads(attention.key(hidden), attention), _heads(attention.value(hidden), attention))
            hidden = layer.attention.output(_merge(scaled_dot_product_attention(query, *own, attn_mask=mask)), hidden)
            attention = layer.crossattention.self
            query = _heads(attention.query(hidden), attention)
            seen = scaled_dot_product_attention(query, key[image_rows], value[image_rows])
            hidden = layer.crossattention.output(_merge(seen), hidden)
            hidden = layer.feed_forward_chunk(hidden)
        return self._model.itm_head(hidden[:, 0])


def _by_images(image_rows: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Groups of a few pictures with all their combinations: sorted picture rows, positions in ``image_rows``."""
    images = np.unique(image_rows)
    for first in range(0, len(images), IMAGES_AT_ONCE):
        rows = images[first : first + IMAGES_AT_ONCE]
        yield rows, np.flatnonzero((image_rows >= rows[0]) & (image_rows <= rows[-1]))


def _heads(states: torch.Tensor, attention: Any) -> torch.Tensor:
    """(n, length, width) to (n, heads, length, head width)."""
    n, length, _ = states.shape
    return states.view(n, length, attention.num_attention_heads, -1).transpose(1, 2)


def _merge(states: torch.Tensor) -> torch.Tensor:
    """The reverse of `_heads`."""
    return states.transpose(1, 2).flatten(-2)


def load_blip(model: str, device: str = "auto", precision: str = "auto") -> BlipDiscriminator:
    """Load ``BlipForImageTextRetrieval`` from a local folder, or by its id on the model hub.

    Raises:
        InputError: transformers is not installed, or the model cannot be loaded or has no matching head.
    """
    try:
        transformers: Any = import_module("transformers")
    except ImportError:
        raise InputError("blip: needs transformers; install it with `pip install 'fnpipe[blip]'`") from None
    on = pick_device(device)
    chosen = pick_precision(precision, on)
    if not model:
        raise InputError(
            "--discriminator blip: name the model, such as blip:Salesforce/blip-itm-base-coco or blip:FOLDER"
        )
    # Without this, every file of a model waits half a minute for a hub that cannot be reached, be it cached or not.
    local = Path(model).is_dir() or not hub.answers()
    load = partial(_from_pretrained, model=model, local_files_only=local)
    loaded, info = load(transformers.BlipForImageTextRetrieval, output_loading_info=True)
    missing = sorted(info["missing_keys"])
    if missing:
        raise InputError(
            f"--discriminator blip:{model}: {len(missing)} weights of a retrieval model are missing (such as "
            f"{missing[0]}); take one trained for image-text matching, such as Salesforce/blip-itm-base-coco"
        )
    image_processor, tokenizer = load(transformers.AutoImageProcessor), load(transformers.AutoTokenizer)
    description = {
        "kind": "blip",
        "model": Path(model).name if Path(model).is_dir() else model,
        "weights": digest_weights(loaded),
        "precision": chosen,
        "device": on.type,
    }
    loaded = loaded.to(device=on, dtype=dtype_of(chosen)).eval().requires_grad_(False)
    return BlipDiscriminator(loaded, image_processor, tokenizer, description)


def _from_pretrained(kind: Any, model: str, *, local_files_only: bool, **options: Any) -> Any:
    try:
        return kind.from_pretrained(model, local_files_only=local_files_only, **options)
    except Exception as error:
        if local_files_only and not Path(model).is_dir() and isinstance(error, OSError):
            raise InputError(
                f"--discriminator blip:{model}: neither a folder here nor a whole model in the cache, and the hub "
                "cannot be reached; give blip:FOLDER, or fetch the model where there is a network"
            ) from None
        # Whatever a loader raises here is the trouble of the folder, the cache or the network.
        reason = f"{type(error).__name__}: {one_line(error)}"
        raise InputError(f"--discriminator blip:{model}: cannot be loaded ({reason})") from None
