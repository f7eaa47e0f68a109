"""A trained model's two towers as a directory that open_clip loads: the same embeddings without fnpipe.

    open_clip_config.json            architecture and preprocessing
    open_clip_model.safetensors      the towers' weights, logit_scale, and logit_bias for SigLIP's loss
    tokenizer.json, ...              where open_clip's default tokenizer is not the model's

open_clip looks at padding, which the two-way text pass here does not. It can be told not to by one way alone, CoCa's:
a learned [CLS] behind the caption that masks the ids equal to ``pad_id``. Its mask is one position late: position i
shows if the id at i - 1 is no padding. So with ``pad_id`` the end of text, and rows filled up with ends of text, the
caption shows up to its first end and nothing behind it; and a [CLS] that starts as position 0 does comes out as
position 0 does. That serves models that pool the first position (fnpipe-tiny, albef-base). A caption's end stands at
another position in each row, and has no such double.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fnpipe.pipeline.embed.open_clip import create_model
from fnpipe.pipeline.errors import InputError
from fnpipe.pipeline.files import atomic
from fnpipe.pipeline.files.destination import new_directory
from fnpipe.train.keys import TINY
from fnpipe.train.model import tiny
from fnpipe.train.model.build import architecture_layout
from fnpipe.train.model.model import VLModel
from fnpipe.train.model.tokenizer import write_tokenizer

CONFIG, WEIGHTS = "open_clip_config.json", "open_clip_model.safetensors"
# Above rounding, far below what a wrong mask, token or activation does.
_MAX_DIFFERENCE = 1e-5
_PROBES = ("a red circle", "Two dogs & a cat, 3 o'clock", "", "日本", "word " * 100)


@dataclass(frozen=True)
class ExportedModel:
    """What was written.

    Attributes:
        needs: a module to import before open_clip can build the model, or None.
        difference: the largest of any number of an embedding, of a few made-up pictures and captions.
    """

    path: str
    model: str
    logit_scale: float
    logit_bias: float | None
    needs: str | None
    difference: float


def export_model(model: VLModel, directory: str | Path) -> ExportedModel:
    """Write ``directory`` for open_clip's ``local-dir:``; what was written is loaded and compared before it is kept.

    Raises:
        InputError: the directory holds something already, or open_clip cannot give this model's embeddings.
    """
    with new_directory(directory, "fnpipe export-model") as unfinished:
        model = model.eval()
        _check_exportable(model)
        tensors = _write(model, unfinished)
        difference = _difference(model, unfinished)
        if not difference <= _MAX_DIFFERENCE:
            name = model.config.architecture
            raise InputError(f"{name}: cannot be exported: open_clip gives other embeddings, by up to {difference:.2g}")
    bias = tensors.get("logit_bias")
    return ExportedModel(
        path=str(directory),
        model=model.config.architecture,
        logit_scale=float(tensors["logit_scale"].exp()),
        logit_bias=None if bias is None else float(bias),
        needs=tiny.__name__ if model.config.architecture == TINY else None,
        difference=difference,
    )


def _check_exportable(model: VLModel) -> None:
    name, layout = model.config.architecture, architecture_layout(model.config.architecture)
    if model.text.two_way and not (model.text.pools_first and model.tokenizer.starts_alike):
        raise InputError(
            f"{name}: captions were embedded by a text pass that sees both ways, and open_clip, which does not mask "
            "padding, has none such; train with --set text_attention=own to export"
        )
    size = layout["vision_cfg"].get("image_size", 224)
    if "timm_model_name" in layout["vision_cfg"] and size != model.image_size:
        raise InputError(
            f"{name}: trained at {model.image_size} px, and open_clip builds timm's towers at {size} px only; "
            "train without image_size to export"
        )


def _write(model: VLModel, directory: Path) -> dict[str, torch.Tensor]:
    """Write all files, and return the tensors."""
    from safetensors.torch import save_file

    config = architecture_layout(model.config.architecture)
    config["vision_cfg"]["image_size"] = model.image_size
    if model.config.quick_gelu:
        config["quick_gelu"] = True
    config.pop("init_logit_bias", None)
    tensors = _towers(model)
    if model.bias is not None:
        config["init_logit_bias"] = -10
    if model.text.two_way:
        end = model.tokenizer.eot_id
        config["custom_text"] = True
        config["text_cfg"] |= {"no_causal_mask": True, "embed_cls": True, "pad_id": end, "pool_type": "last"}
        tensors = _with_a_double_of_the_first(tensors, model.tokenizer.cls_id)
    config["text_cfg"] |= write_tokenizer(model.tokenizer, directory, pad_with_end=model.text.two_way)
    atomic.write_json(directory / CONFIG, {"model_cfg": config, "preprocess_cfg": dict(model.config.preprocess or {})})
    with atomic.replacing(directory / WEIGHTS) as temporary:
        save_file(tensors, temporary)
    return tensors


def _towers(model: VLModel) -> dict[str, torch.Tensor]:
    """open_clip's own weights, with the trained temperature and bias in place of those that it started from."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in model.clip.state_dict().items()}
    scale = tensors["logit_scale"]
    tensors["logit_scale"] = torch.full_like(scale, -math.log(float(model.temp.detach())))
    # A model of SigLIP's kind that was trained by the softmax loss has a bias, which took no part.
    tensors.pop("logit_bias", None)
    if model.bias is not None:
        tensors["logit_bias"] = torch.full_like(scale, float(model.bias.detach()))
    return tensors


def _with_a_double_of_the_first(tensors: dict[str, torch.Tensor], cls_id: int | None) -> dict[str, torch.Tensor]:
    """The weights of a text tower with CoCa's [CLS] behind the caption that equals the token at position 0."""
    from open_clip.model import convert_to_custom_text_state_dict

    tensors = convert_to_custom_text_state_dict(tensors)
    positions = tensors["text.positional_embedding"]
    tensors["text.positional_embedding"] = torch.cat([positions, positions[:1]])
    tensors["text.cls_emb"] = tensors["text.token_embedding.weight"][cls_id].clone()
    return tensors


@torch.inference_mode()
def _difference(model: VLModel, directory: Path) -> float:
    """The largest difference between the model's embeddings and those of the directory's, on the model's device."""
    import open_clip

    name, device = f"local-dir:{directory}", model.temp.device
    try:
        clip: Any = create_model(name, device=device).eval()
        tokenize = open_clip.get_tokenizer(name)
    except ImportError as error:
        raise InputError(f"{model.config.architecture}: its tokenizer needs the package transformers") from error
    size = model.image_size
    pixels = torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(0)).to(device)
    images = clip.encode_image(pixels, normalize=True) - model.encode_image(pixels)[1]
    captions = list(_PROBES)
    texts = clip.encode_text(tokenize(captions).to(device), normalize=True)
    texts = texts - model.embed_texts(model.tokenizer(captions).to(device))
    return float(torch.cat([images, texts]).abs().max())
