"""From a config, or a file of ours, to a model: open_clip's towers, with the checkpoint that the config names."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from fnpipe.pipeline.embed.open_clip import published_preprocessing, require_room
from fnpipe.pipeline.errors import InputError, nearest, one_line
from fnpipe.pipeline.machine import hub
from fnpipe.train.keys import TINY
from fnpipe.train.model import coca, tiny
from fnpipe.train.model.config import ModelConfig
from fnpipe.train.model.model import VLModel
from fnpipe.train.model.tensorfile import read_tensors, require_fits, write_tensors
from fnpipe.train.model.tokenizer import open_clip_tokenizer, tiny_tokenizer

_FORMAT = "fnpipe-model-1"


def build_model(config: ModelConfig) -> VLModel:
    """Make the model that a config describes, with its checkpoint's weights where one is named.

    Raises:
        InputError: unknown architecture (names the nearest), tag or file; a kind of text tower that cannot be used.
    """
    return _build(config, load_weights=True)


def _build(config: ModelConfig, *, load_weights: bool, device: str = "cpu") -> VLModel:
    import open_clip

    tiny.register()
    name = config.architecture
    layout = architecture_layout(name, captions=True)
    pretrained = config.pretrained if load_weights else None
    tag = open_clip.get_pretrained_cfg(name, pretrained) if pretrained else {}
    if pretrained and Path(pretrained).is_file():
        require_room(name, pretrained)
    # With the other activation a checkpoint is worth much less, and open_clip only warns.
    config = replace(config, quick_gelu=config.quick_gelu or bool(tag.get("quick_gelu")))
    reachable = True
    try:
        with without_warnings(), hub.or_cache() if tag else nullcontext(True) as reachable:
            clip = open_clip.create_model(
                name,
                pretrained=pretrained,
                device=device,
                force_quick_gelu=config.quick_gelu,
                # Asking for the size that it has anyway would resize the position embedding of timm's towers.
                force_image_size=None if config.image_size == layout["vision_cfg"]["image_size"] else config.image_size,
                force_preprocess_cfg=None if tag else _preprocess(config),
                pretrained_image=False,
            )
    except Exception as error:
        if pretrained is None:
            raise
        if not reachable:
            raise InputError(
                f"--init {pretrained} of {name}: not in the cache, and the model hub cannot be reached; fetch it where "
                "there is a network, or give a checkpoint file"
            ) from None
        raise InputError(_bad_checkpoint(name, pretrained, error)) from error
    if coca.is_coca(clip) and pretrained is None:
        coca.start_decoder(clip)
    context, vocabulary = layout["text_cfg"].get("context_length", 77), layout["text_cfg"].get("vocab_size", 49408)
    tokenizer = tiny_tokenizer(context) if name == TINY else open_clip_tokenizer(name, context, vocabulary)
    return VLModel(clip, tokenizer, _resolved(config, clip))


@contextmanager
def without_warnings() -> Iterator[None]:
    """open_clip says through the root logger that weights are random, and what it raises as well."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(before)


def _preprocess(config: ModelConfig) -> dict[str, Any] | None:
    """The preprocessing of a model whose checkpoint brings none; a stored model's is in its config."""
    if config.preprocess is not None:
        return dict(config.preprocess)
    return _PREPROCESS.get(config.architecture) or published_preprocessing(config.architecture)


# The preprocessing of our own architectures; all others have open_clip's. Drawn scenes and emoji are whole pictures, of
# which a crop would cut off what the caption speaks of.
_PREPROCESS: dict[str, dict[str, Any]] = {
    TINY: {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5), "resize_mode": "squash"}
}


def architecture_layout(name: str, *, captions: bool = False) -> dict[str, Any]:
    """open_clip's configuration of an architecture, refused in one line where it cannot be used; a CoCa can where its
    ``captions`` are asked for."""
    import open_clip

    layout = open_clip.get_model_config(name) if name in open_clip.list_models() else None
    if layout is None:
        raise InputError(f"no model {name!r} in open_clip's list{nearest(name, open_clip.list_models())}")
    if layout["text_cfg"].get("hf_model_name"):
        raise InputError(
            f"{name}: its text tower is a transformers model; take one with open_clip's own, such as ViT-B-32"
        )
    if "multimodal_cfg" in layout and not captions:
        raise InputError(f"{name}: CoCa brings a decoder of its own; take a two-tower model, such as ViT-B-32")
    return layout  # type: ignore[no-any-return]


def _bad_checkpoint(name: str, pretrained: str, error: Exception) -> str:
    import open_clip

    tags: list[str] = open_clip.list_pretrained_tags_by_model(name)
    if Path(pretrained).is_file() or pretrained in tags:
        return f"{pretrained}: cannot be loaded as {name}: {one_line(error)}"
    known = f"; its tags: {', '.join(tags)}" if tags else ""
    return f"{name}: {pretrained!r} is neither a file nor a tag of it{nearest(pretrained, tags)}{known}"


def _resolved(config: ModelConfig, clip: nn.Module) -> ModelConfig:
    """The config with every default filled in from the model that was built."""
    visual: Any = clip.visual
    preprocess = {k: list(v) if isinstance(v, tuple) else v for k, v in visual.preprocess_cfg.items()}
    size = preprocess["size"]
    tiny_one = config.architecture == TINY
    keep_mask = coca.is_coca(clip) or (config.pretrained and config.text_attention is None)
    return replace(
        config,
        image_size=size[0] if isinstance(size, list) else size,
        fusion_layers=None if coca.is_coca(clip) else config.fusion_layers or (2 if tiny_one else 6),
        text_attention="own" if keep_mask else config.text_attention or "bidirectional",
        preprocess=preprocess,
    )


# ---------------------------------------------------------------------------------------------------- files
def save_model(model: VLModel, path: str | Path) -> None:
    """Write weights and config as one safetensors file, atomically; equal models give equal bytes."""
    metadata = {"format": _FORMAT, "config": json.dumps(asdict(model.config), sort_keys=True)}
    write_tensors(Path(path), model.state_dict(), metadata)


def load_model(path: str | Path) -> VLModel:
    """Read `save_model`'s file: the same model, on the CPU, in eval mode. Nothing is downloaded.

    Raises:
        InputError: no such file, or not a model file of ours.
    """
    tensors, metadata = read_tensors(Path(path))
    if str(metadata.get("format")).startswith("fnpipe-frozen"):
        raise InputError(f"{path}: a network on frozen embeddings ({metadata.get('method')}), which reads no pictures")
    if metadata.get("format") != _FORMAT:
        raise InputError(f"{path}: not a model saved by fnpipe (format {metadata.get('format')!r})")
    try:
        stored = dict(json.loads(metadata["config"]))
    except (KeyError, ValueError, TypeError, RecursionError):
        raise InputError(f"{path}: damaged (no config of a model)") from None
    unknown = sorted(set(stored) - {field.name for field in fields(ModelConfig)})
    if unknown:
        raise InputError(f"{path}: saved by a newer fnpipe, with the settings {', '.join(unknown)}; update fnpipe")
    try:
        config = ModelConfig(**stored)
        if (config.fusion_layers or 0) > len(tensors):
            raise InputError(f"{path}: damaged, not a whole model (too few tensors for {config.fusion_layers} layers)")
        require_fits(Path(path), tensors, partial(_build, config, load_weights=False, device="meta"))
        model = _build(config, load_weights=False)
        model.load_state_dict(tensors)
    except (RuntimeError, TypeError, ValueError, KeyError, AttributeError) as error:
        # A config that is none fails wherever it is used first.
        raise InputError(f"{path}: damaged, not a whole model ({one_line(error)})") from error
    return model.eval()
