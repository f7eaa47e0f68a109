"""Encoders: what turns pictures and captions into vectors, and open_clip's models as such.

An `Encoder` is all that ``embed`` asks for, so that a model trained here can be handed in as well.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from fnpipe.pipeline.errors import InputError, nearest, one_line
from fnpipe.pipeline.files.digests import digest_weights
from fnpipe.pipeline.images.transform import Transform
from fnpipe.pipeline.machine import hub
from fnpipe.pipeline.machine.device import dtype_of, pick_device, pick_precision


class OpenClipEncoder:
    """A model of open_clip. Made by `load_open_clip`."""

    def __init__(
        self,
        model: torch.nn.Module,
        tokenizer: Any,
        transform: Transform,
        width: int,
        description: Mapping[str, Any],
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.width = width
        self.description = description
        # Attributes rather than methods: a worker process gets these two without the weights.
        self.prepare_image = transform
        self.tokenize = Tokenize(tokenizer)
        self._model = model
        self.transform = transform
        self._device = device
        self.dtype = dtype
        self._tower = text_tower_to_cut(model)

    @torch.inference_mode()
    def encode_images(self, batch: torch.Tensor, /) -> torch.Tensor:
        pixels = self.transform.normalise(batch.to(self._device, non_blocking=True))
        pixels = pixels.to(self.dtype, memory_format=torch.channels_last)
        return _tensor(self._model.encode_image(pixels))  # type: ignore[operator]

    @torch.inference_mode()
    def encode_texts(self, tokens: torch.Tensor, /) -> torch.Tensor:
        if self._tower is not None:
            return encode_cut_texts(self._tower, tokens, self._device)
        return _tensor(self._model.encode_text(tokens.to(self._device, non_blocking=True)))  # type: ignore[operator]


class Tokenize:
    """open_clip's tokenizer of a model, with captions that spell out its control tokens read as plain words."""

    # open_clip's own tokenizer turns these into the control tokens themselves, wherever they stand; the embedding
    # would be taken at the first one. It ignores case here.
    _CONTROL = re.compile(r"<(start_of_text|end_of_text)>", re.IGNORECASE)

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __call__(self, captions: list[str]) -> torch.Tensor:
        return _tensor(self._tokenizer(self._plain(captions)))

    def is_cut(self, captions: Sequence[str], /) -> list[bool]:
        """Whether each caption loses its tail: with room for one token more, another stands where its end stood."""
        if not captions:
            return []
        rows = _tensor(self._tokenizer(self._plain(captions)))
        longer = _tensor(self._tokenizer(self._plain(captions), context_length=rows.shape[1] + 1))
        return (longer[:, :-1] != rows).any(dim=1).tolist()

    def _plain(self, captions: Sequence[str]) -> list[str]:
        return [self._CONTROL.sub(r"< \1 >", caption) for caption in captions]


def text_tower_to_cut(model: torch.nn.Module) -> Any | None:
    """The text tower, if the tokens behind the pooled one cannot change its output; else None.

    That holds where attention is causal and the embedding is taken at the end token. SigLIP's towers look at the
    padding and pool the last position: they get their full context.
    """
    tower: Any = getattr(model, "text", model)
    causal = getattr(tower, "attn_mask", None) is not None and getattr(tower, "cls_emb", None) is None
    return tower if causal and _pooling(tower) in ("argmax", "eos") else None


def encode_cut_texts(tower: Any, tokens: torch.Tensor, device: torch.device) -> torch.Tensor:
    """open_clip's text tower on (n, L) tokens cut behind the last pooled one; (n, width).

    The final norm works on each position alone, so only the pooled position goes through it.
    """
    if _pooling(tower) == "argmax":
        pooled = tokens.argmax(dim=-1)
    else:
        eos = tower.eos_id if hasattr(tower, "pool_type") else tower.text_eos_id
        pooled = torch.eq(tokens, eos).int().argmax(dim=-1)
    length = int(pooled.max()) + 1
    tokens = tokens[:, :length].to(device, non_blocking=True)
    dtype = tower.transformer.get_cast_dtype()
    x = tower.token_embedding(tokens).to(dtype) + tower.positional_embedding[:length].to(dtype)
    x = tower.transformer(x, attn_mask=tower.attn_mask[:length, :length])
    x = tower.ln_final(x[torch.arange(len(x), device=device), pooled.to(device, non_blocking=True)])
    projection = tower.text_projection
    if projection is None:
        return _tensor(x)
    return _tensor(projection(x) if isinstance(projection, torch.nn.Linear) else x @ projection)


def load_open_clip(
    name: str, pretrained: str | None = None, device: str = "auto", precision: str = "auto"
) -> OpenClipEncoder:
    """Load a model of open_clip.

    Args:
        name: an architecture such as ``ViT-B-32``, or ``local-dir:DIR`` / ``hf-hub:ORG/REPO``, which bring weights.
        pretrained: a tag of that architecture (fetched once, then cached), or a checkpoint file.
        device: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.
        precision: ``auto``, ``fp32``, ``bf16`` or ``fp16``.

    Raises:
        InputError: there is no such model, tag, file or device, or the file does not fit the model.
    """
    import open_clip

    name = check_model(name, pretrained)
    on = pick_device(device)
    chosen = pick_precision(precision, on)
    tag = published_tag(name, pretrained)
    try:
        with hub.or_cache(bool(tag) or _needs_hub(name)):
            model = create_model(name, pretrained).eval()
            tokenizer = open_clip.get_tokenizer(name)
    except InputError:
        raise
    except hub.NotCached as error:
        what = f"--pretrained {pretrained} of {name}" if pretrained else name
        raise InputError(
            f"{what}: {error}; fetch it where there is a network, give a checkpoint file with --pretrained FILE, or "
            "embed with --model run:NAME, a model trained here"
        ) from None
    except Exception as error:
        # Whatever a loader raises here is the trouble of the file, the cache or the network.
        raise InputError(
            f"{pretrained or name}: cannot be loaded as {name} ({type(error).__name__}: {one_line(error)}); give a "
            "checkpoint file of this architecture with --pretrained FILE"
        ) from None
    transform = Transform.of(open_clip.get_model_preprocess_cfg(model))
    config = open_clip.get_model_config(name)
    description = {
        "model": name,
        "pretrained": Path(pretrained).name if pretrained and not tag else pretrained,
        "weights": digest_weights(model),
        "precision": chosen,
        "device": on.type,
        "preprocessing": asdict(transform),
    }
    dtype = dtype_of(chosen)
    model = model.to(device=on, dtype=dtype).requires_grad_(False)
    return OpenClipEncoder(model, tokenizer, transform, int(config["embed_dim"]), description, on, dtype)


def create_model(
    name: str,
    pretrained: str | None = None,
    *,
    device: torch.device | str = "cpu",
    quick_gelu: bool = False,
    image_size: int | None = None,
    preprocess: Mapping[str, Any] | None = None,
) -> torch.nn.Module:
    """Build a model of open_clip's, float32, with its published weights, those of a file, or random ones.

    Args:
        name: as in `load_open_clip`. pretrained: a tag or a file; what open_clip needs of the hub is the caller's to
            ask for, with `hub.or_cache`.
        quick_gelu: also where the tag does not ask for it. image_size: None: the architecture's.
        preprocess: for weights without a tag; None: what the architecture's published weights agree on.

    Raises:
        InputError: the file is too small. Anything else: as open_clip says that it cannot load something.
    """
    import open_clip

    tag = published_tag(name, pretrained)
    if pretrained and not tag and Path(pretrained).is_file():
        require_room(name, pretrained)
    with without_warnings():
        model: torch.nn.Module = open_clip.create_model(
            name,
            pretrained=pretrained,
            device=device,
            # With the other activation weights are worth much less, and open_clip only warns.
            force_quick_gelu=quick_gelu or bool(tag.get("quick_gelu")),
            force_image_size=image_size,
            force_preprocess_cfg=None if tag else dict(preprocess or published_preprocessing(name) or {}) or None,
        )
    return model


def published_tag(name: str, pretrained: str | None) -> Mapping[str, Any]:
    """What open_clip knows of published weights; empty where they are a file or none."""
    import open_clip

    return open_clip.get_pretrained_cfg(name, pretrained) if pretrained else {}


@contextmanager
def without_warnings() -> Iterator[None]:
    """open_clip says through the root logger that weights are random, and what it raises as well."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(before)


def _needs_hub(name: str) -> bool:
    """Whether a model's files, or its tokenizer's, come from the model hub."""
    import open_clip

    text = (open_clip.get_model_config(name) or {}).get("text_cfg", {}) if ":" not in name else {}
    return name.startswith("hf-hub:") or "hf_tokenizer_name" in text or "hf_model_name" in text


def check_model(name: str, pretrained: str | None) -> str:
    """The architecture's name as open_clip lists it, once it and its weights are known to exist; no network.

    Raises:
        InputError: the name, the tag or the file is unknown; the message gives the nearest or the choice.
    """
    import open_clip

    if ":" in name:
        return _check_own_weights(name, pretrained)
    name, known = name.replace("/", "-"), open_clip.list_models()
    if name not in known:
        raise InputError(f"--model {name}: open_clip has no such model{nearest(name, known)}")
    tags = open_clip.list_pretrained_tags_by_model(name)
    some = ", ".join(tags[:6]) + (f" and {len(tags) - 6} more" if len(tags) > 6 else "")
    choice = f"one of its tags ({some}) or a checkpoint file" if tags else "a checkpoint file"
    if not pretrained:
        raise InputError(f"--model {name}: without weights its vectors mean nothing; name {choice} with --pretrained")
    # open_clip reads tags without regard to case and with - for _.
    if pretrained.lower().replace("-", "_") not in tags and not Path(pretrained).is_file():
        raise InputError(
            f"--pretrained {pretrained}: neither a file nor a tag of {name}{nearest(pretrained, tags)}; give {choice}"
        )
    return name


def _check_own_weights(name: str, pretrained: str | None) -> str:
    """A name with a scheme brings its own weights."""
    scheme, _, rest = name.partition(":")
    if scheme not in ("local-dir", "hf-hub"):
        raise InputError(
            f"--model {name}: unknown kind {scheme!r}; use an open_clip name, local-dir:DIR or hf-hub:REPO"
        )
    if pretrained:
        raise InputError(f"--model {name} brings its own weights; leave --pretrained {pretrained} out")
    if scheme == "local-dir" and not (Path(rest) / "open_clip_config.json").is_file():
        raise InputError(f"--model {name}: {rest} holds no open_clip_config.json")
    return name


def require_room(name: str, file: str) -> None:
    """Refuse a checkpoint file that is too small for the weights of an architecture, before these are made.

    Raises:
        InputError: it has fewer bytes than the transformers of the two towers have weights.
    """
    import open_clip

    layout = open_clip.get_model_config(name) or {}
    parts = [layout.get(key) or {} for key in ("text_cfg", "vision_cfg")]
    fewest = parts[0].get("vocab_size", 0) * parts[0].get("width", 0) + sum(_block_weights(**part) for part in parts)
    size_bytes = Path(file).stat().st_size
    if size_bytes < fewest:
        raise InputError(
            f"{file}: {size_bytes:,} bytes are no checkpoint of {name}, which has {fewest:,} weights and more"
        )


def _block_weights(layers: Any = 0, width: Any = 0, mlp_ratio: float = 4.0, **_: Any) -> int:
    """The weights in the matrices of a tower's blocks; 0 of what is no plain transformer."""
    known = isinstance(layers, int) and isinstance(width, int)
    return int(layers * width**2 * (4 + 2 * mlp_ratio)) if known else 0


def published_preprocessing(name: str) -> dict[str, Any] | None:
    """What all published weights of a model agree on, for a checkpoint file, which does not say.

    open_clip would take CLIP's own mean and crop, which is wrong for a SigLIP checkpoint.
    """
    import open_clip

    if ":" in name:
        return None
    keys = ("mean", "std", "interpolation", "resize_mode")
    configs = [open_clip.get_pretrained_cfg(name, tag) for tag in open_clip.list_pretrained_tags_by_model(name)]
    found = [{key: config[key] for key in keys if key in config} for config in configs]
    return found[0] if found and all(one == found[0] for one in found) else None


def _pooling(tower: Any) -> str | None:
    return getattr(tower, "pool_type", None) or getattr(tower, "text_pool_type", None)


def _tensor(value: Any) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"the model gave {type(value).__name__}, not a tensor")
    return value
