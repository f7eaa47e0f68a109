"""From a config, or a file of ours, to a model: open_clip's towers, with the checkpoint that the config names."""

from __future__ import annotations

import json
from dataclasses import asdict, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from fnpipe.pipeline.embed.open_clip import create_model, published_tag
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
    tiny.register()
    name = config.architecture
    layout = architecture_layout(name, captions=True)
    pretrained = config.pretrained if load_weights else None
    tag = published_tag(name, pretrained)
    config = replace(config, quick_gelu=config.quick_gelu or bool(tag.get("quick_gelu")))
    # Asking for the size that it has anyway would resize the position embedding of timm's towers.
    size = None if config.image_size == layout["vision_cfg"]["image_size"] else config.image_size
    # A stored model's preprocessing is in its config.
    preprocess = config.preprocess or _PREPROCESS.get(name)
    try:
        with hub.or_cache(bool(tag)):
            clip = create_model(
                name, pretrained, device=device, quick_gelu=config.quick_gelu, image_size=size, preprocess=preprocess
            )
    except InputError:
        raise
    except hub.NotCached as error:
        raise InputError(
            f"--init {pretrained} of {name}: {error}; fetch it where there is a network, or give a checkpoint file"
        ) from None
    except Exception as error:
        if pretrained is None:
            raise
        raise InputError(_bad_checkpoint(name, pretrained, error)) from error
    if coca.is_coca(clip) and pretrained is None:
        coca.start_decoder(clip)
    context, vocabulary = layout["text_cfg"].get("context_length", 77), layout["text_cfg"].get("vocab_size", 49408)
    tokenizer = tiny_tokenizer(context) if name == TINY else open_clip_tokenizer(name, context, vocabulary)
    return VLModel(clip, tokenizer, _resolved(config, clip))


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
        raise InputError(
            f"no model {name!r} in open_clip's list{nearest(name, open_clip.list_models())}; open_clip.list_models() "
            "has all, and open_clip.add_model_config(FILE) adds one"
        )
    if layout["text_cfg"].get("hf_model_name"):
        raise InputError(
            f"{name}: its text tower is a transformers model; take one with open_clip's own, such as ViT-B-32"
        )
    if "multimodal_cfg" in layout and not captions:
        raise InputError(f"{name}: CoCa brings a decoder of its own; take a two-tower model, such as ViT-B-32")
    return layout


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
