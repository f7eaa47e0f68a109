"""The vision-language model: open_clip's two towers, a fusion encoder over their tokens, and the ITM and MLM heads.

The shape is ALBEF's (NeurIPS 2021, arXiv:2107.07651): an image tower, a text tower, and text layers that attend to the
image's tokens. Any open_clip architecture with a text tower of its own gives the towers. Two passes over a caption may
differ: the *contrastive* one, whose pooled output is compared with images, keeps the mask that a checkpoint was trained
with; fusion and masked-token prediction need tokens that see both ways. A model trained from scratch has no mask to
keep, so one two-way pass serves both (``text_attention``).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from fnpipe.pipeline.encoders import published_preprocessing
from fnpipe.pipeline.errors import InputError, nearest
from fnpipe.pipeline.transform import Transform
from fnpipe.train import coca, tiny
from fnpipe.train.tensorfile import read_tensors, write_tensors
from fnpipe.train.tokenizer import CaptionTokenizer, open_clip_tokenizer, tiny_tokenizer

MIN_TEMPERATURE, MAX_TEMPERATURE, INITIAL_TEMPERATURE = 0.001, 0.5, 0.07
_FORMAT = "fnpipe-model-1"

# For each fusion layer, (images, image tokens, 2 x width): what `Attention.keys` gives.
Keys = list[torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """What `build_model` builds. None is "as the architecture says"; a built model's own config has no None but
    ``pretrained`` left, so that it builds the same model again without the checkpoint that it started from."""

    architecture: str = tiny.TINY
    """``fnpipe-tiny``, ``albef-base``, or any name of open_clip's list."""
    pretrained: str | None = None
    """A tag of open_clip, or a local checkpoint file of the two towers."""
    image_size: int | None = None
    fusion_layers: int | None = None
    """2 for fnpipe-tiny, else 6 (ALBEF); a CoCa has none, and None."""
    itc_loss: Literal["softmax", "sigmoid"] = "softmax"
    """``sigmoid`` adds SigLIP's learned bias to the model."""
    text_attention: Literal["own", "bidirectional"] | None = None
    """The mask of the contrastive text pass. Default: the checkpoint's ``own``, ``bidirectional`` from scratch."""
    quick_gelu: bool = False
    """CLIP's first activation, on which some checkpoints were trained; set by their tag, or by hand for a file."""
    grad_checkpointing: bool = False
    preprocess: Mapping[str, Any] | None = None
    """open_clip's preprocessing settings: size, mean, std, interpolation, resize_mode."""

    def __post_init__(self) -> None:
        if self.fusion_layers is not None and self.fusion_layers < 1:
            raise InputError(f"fusion_layers is {self.fusion_layers}; it must be at least 1")
        if self.architecture == tiny.TINY and self.image_size not in (None, 64):
            raise InputError(f"fnpipe-tiny takes pictures of 64 px, image_size is {self.image_size}")
        for name, known in (("itc_loss", ("softmax", "sigmoid")), ("text_attention", ("own", "bidirectional", None))):
            if getattr(self, name) not in known:
                raise InputError(f"{name} is {getattr(self, name)!r}; it must be one of {known}")


# ---------------------------------------------------------------------------------------------------- fusion
class Attention(nn.Module):
    """Multi-head attention whose keys can be prepared once and used by many rows of queries."""

    def __init__(self, width: int, heads: int, context_width: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width)
        self.key_value = nn.Linear(context_width, 2 * width)
        self.out = nn.Linear(width, width)

    def keys(self, context: torch.Tensor) -> torch.Tensor:
        """(n, T, context_width) -> (n, T, 2 x width), keys and values side by side: one tensor, so that repeating rows
        of it for other queries is one copy."""
        return self.key_value(context)  # type: ignore[no-any-return]

    def forward(self, x: torch.Tensor, keys: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """x (n, L, width), keys (n, T, 2 x width); mask broadcasts to (n, heads, L, T), True where one may be seen."""
        rows, length, width = x.shape
        query = self.query(x).view(rows, length, self.heads, -1).transpose(1, 2)
        key, value = keys.view(rows, keys.shape[1], 2, self.heads, -1).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return self.out(seen.transpose(1, 2).reshape(rows, length, width))  # type: ignore[no-any-return]


class FusionBlock(nn.Module):
    """One layer of the fusion encoder: self-attention, cross-attention to the image, feed-forward; norms first."""

    def __init__(self, width: int, heads: int, image_width: int, hidden: int) -> None:
        super().__init__()
        self.norm_self, self.norm_cross, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width), nn.LayerNorm(width)
        self.self_attention = Attention(width, heads, width)
        self.cross_attention = Attention(width, heads, image_width)
        self.mlp = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))

    def forward(
        self,
        x: torch.Tensor,
        mask: torch.Tensor,
        image_keys: torch.Tensor,
        first_only: bool = False,
    ) -> torch.Tensor:
        """(n, L, width) -> (n, L, width), or (n, 1, width) with ``first_only``: the same values at position 0."""
        normed = self.norm_self(x)
        keys = self.self_attention.keys(normed)
        if first_only:
            x, normed = x[:, :1], normed[:, :1]
        x = x + self.self_attention(normed, keys, mask)
        x = x + self.cross_attention(self.norm_cross(x), image_keys)
        return x + self.mlp(self.norm_mlp(x))  # type: ignore[no-any-return]


# ---------------------------------------------------------------------------------------------------- towers
def _image_tokens(visual: nn.Module, pixels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens (B, P, width) after the tower's last norm, and the projected pooled feature (B, e)."""
    import open_clip.model

    if isinstance(visual, open_clip.model.TimmModel):
        features = visual.trunk.forward_features(pixels)
        return _as_tokens(features, visual.trunk.num_features), visual.head(visual.trunk.forward_head(features))
    if isinstance(visual, open_clip.model.ModifiedResNet):
        grid = visual.stem(pixels)
        for layer in (visual.layer1, visual.layer2, visual.layer3, visual.layer4):
            grid = layer(grid)
        return grid.flatten(2).transpose(1, 2), visual.attnpool(grid)
    out = visual.forward_intermediates(  # type: ignore[operator]
        pixels, indices=1, normalize_intermediates=True, output_fmt="NLC", output_extra_tokens=True
    )
    tokens = torch.cat([out["image_intermediates_prefix"][-1], out["image_intermediates"][-1]], 1)
    return tokens, out["image_features"]


def _as_tokens(features: torch.Tensor, width: int) -> torch.Tensor:
    """timm's feature maps, (B, T, C), (B, C, H, W) or (B, H, W, C), as (B, T, C)."""
    if features.ndim == 3:
        return features
    if features.shape[1] == width:
        return features.flatten(2).transpose(1, 2)
    return features.flatten(1, 2)


def _image_width(visual: nn.Module) -> int:
    import open_clip.model

    if isinstance(visual, open_clip.model.TimmModel):
        return int(visual.trunk.num_features)
    if isinstance(visual, open_clip.model.ModifiedResNet):
        return int(visual.attnpool.v_proj.in_features)
    return int(visual.conv1.out_channels)  # type: ignore[union-attr, arg-type]


class TextTower(nn.Module):
    """open_clip's text transformer, whether it stands in the model itself (CLIP) or in ``.text`` (CustomTextCLIP).

    Holds no parameters of its own but the [MASK] row, for a vocabulary that has none.
    """

    def __init__(self, clip: nn.Module, tokenizer: CaptionTokenizer, two_way: bool) -> None:
        super().__init__()
        inner: Any = getattr(clip, "text", clip)
        # Not registered as a child: its parameters belong to `clip`, and are saved and counted there once.
        object.__setattr__(self, "_inner", inner)
        self._pool = inner.pool_type if hasattr(clip, "text") else inner.text_pool_type
        self._tokenizer, self.two_way = tokenizer, two_way
        self.width: int = inner.token_embedding.embedding_dim
        projection = inner.text_projection
        if projection is None:
            self.embed_dim = self.width
        else:
            linear = isinstance(projection, nn.Linear)
            self.embed_dim = int(projection.out_features if linear else projection.shape[1])
        block = inner.transformer.resblocks[0]
        self.heads, self.mlp_width = int(block.attn.num_heads), int(block.mlp.c_fc.out_features)
        self.context_length = tokenizer.context_length
        self.mask_row: nn.Parameter | None = None
        if tokenizer.mask_id == tokenizer.vocabulary_size:
            self.mask_row = nn.Parameter(torch.randn(self.width) * 0.02)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """(n, L) ids, [MASK] allowed -> (n, L, width) with positions."""
        inner: Any = self._inner
        if self.mask_row is None:
            x = inner.token_embedding(ids)
        else:
            is_mask = ids == self._tokenizer.mask_id
            x = torch.where(is_mask[..., None], self.mask_row, inner.token_embedding(ids.masked_fill(is_mask, 0)))
        return x + inner.positional_embedding[: ids.shape[1]]  # type: ignore[no-any-return]

    def tokens(self, ids: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        """The two-way pass: (n, L, width) after the last norm; ``seen`` (n, L) is False on padding."""
        inner: Any = self._inner
        x = self.embed(ids)
        # open_clip's blocks want an additive mask with one (L, L) slice for each row and head.
        bias = torch.zeros(seen.shape, dtype=x.dtype, device=x.device).masked_fill(~seen, float("-inf"))
        bias = bias[:, None, None].expand(-1, self.heads, seen.shape[1], -1).flatten(0, 1)
        return inner.ln_final(inner.transformer(x, attn_mask=bias))  # type: ignore[no-any-return]

    def pooled(self, ids: torch.Tensor, lengths: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """(n, e), the projected contrastive feature; ``tokens`` is what `tokens` gave for these ids.

        The end of text is found by length and not by ``argmax`` over the ids, open_clip's way, which a [MASK] id above
        the end's would capture; on ids without a [MASK] both give the same position.
        """
        x = tokens if self.two_way else self._own_pass(ids)
        first = torch.zeros_like(lengths)
        whole = self._pool == "last" and not self.two_way
        at = first if self._pool == "first" else first + x.shape[1] - 1 if whole else lengths - 1
        return self._project(x[torch.arange(len(x), device=x.device), at])

    def _own_pass(self, ids: torch.Tensor) -> torch.Tensor:
        """Hidden states under the tower's own mask. Without a causal mask padding is seen, and so must have its full
        length; with one it never is, and ``ids`` may be cut."""
        inner: Any = self._inner
        if inner.attn_mask is None or self._pool == "last":
            ids = F.pad(ids, (0, self.context_length - ids.shape[1]), value=self._tokenizer.pad_id)
        mask = None if inner.attn_mask is None else inner.attn_mask[: ids.shape[1], : ids.shape[1]]
        return inner.ln_final(inner.transformer(self.embed(ids), attn_mask=mask))  # type: ignore[no-any-return]

    def _project(self, x: torch.Tensor) -> torch.Tensor:
        projection: Any = self._inner.text_projection  # type: ignore[union-attr]
        if projection is None:
            return x
        return projection(x) if isinstance(projection, nn.Linear) else x @ projection  # type: ignore[no-any-return]

    @property
    def pools_first(self) -> bool:
        """Whether the contrastive feature is taken at position 0."""
        return bool(self._pool == "first")

    @property
    def vocabulary_matrix(self) -> torch.Tensor:
        """(vocabulary, width): the token embedding, without [MASK]'s own row, which is never predicted."""
        inner: Any = self._inner
        return inner.token_embedding.weight  # type: ignore[no-any-return]


# ---------------------------------------------------------------------------------------------------- model
class VLModel(nn.Module):
    """Towers, fusion encoder and heads. Build with `build_model`.

    Attributes:
        config: resolved `ModelConfig`; tokenizer: `CaptionTokenizer`; image_size: int; mean, std: of RGB in [0, 1].
        transform: what evaluation does to a picture; `encode_image` takes what its ``normalise`` gives.
        temp: () parameter, the temperature that similarities are divided by; see `clamp_temperature`.
        bias: () parameter, the sigmoid loss's, or None.
        embed_dim, text_width, image_width: widths e, dt (which the fusion encoder shares) and dv.
        captions: a CoCa, whose captioning loss stands in the place of ITM and MLM.
    """

    def __init__(self, clip: nn.Module, tokenizer: CaptionTokenizer, config: ModelConfig) -> None:
        super().__init__()
        assert config.preprocess is not None
        assert config.image_size is not None
        inner: Any = clip
        self.clip, self.tokenizer, self.config = clip, tokenizer, config
        self.captions = coca.is_coca(clip)
        self.text = TextTower(clip, tokenizer, two_way=config.text_attention == "bidirectional")
        self.image_size = config.image_size
        self.transform = Transform.of(config.preprocess)
        self.mean, self.std = self.transform.mean, self.transform.std
        self.text_width, self.image_width = self.text.width, _image_width(inner.visual)
        self.embed_dim = self.text.embed_dim

        width, hidden = self.text_width, self.text.mlp_width
        blocks = [
            FusionBlock(width, self.text.heads, self.image_width, hidden) for _ in range(config.fusion_layers or 0)
        ]
        self.fusion, self.fusion_norm = nn.ModuleList(blocks), nn.LayerNorm(width)
        self.itm_head = nn.Linear(width, 2)
        # BERT's masked-token head: a transform, then the token embedding as the output layer.
        self.mlm_transform = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width))
        self.mlm_bias = nn.Parameter(torch.zeros(tokenizer.vocabulary_size))

        # open_clip's own scale and bias take no part in our losses; `temp` and `bias` start from them.
        scale, offset = inner.logit_scale, getattr(inner, "logit_bias", None)
        scale.requires_grad_(False)
        start = float(torch.exp(-scale.detach()).mean()) if config.pretrained else INITIAL_TEMPERATURE
        self.temp = nn.Parameter(torch.tensor(start))
        self.bias: nn.Parameter | None = None
        if config.itc_loss == "sigmoid":
            self.bias = nn.Parameter(torch.tensor(-10.0 if offset is None else float(offset.detach().mean())))
        if offset is not None:
            offset.requires_grad_(False)
        self.clamp_temperature()
        if config.grad_checkpointing:
            inner.set_grad_checkpointing(True)

    def clamp_temperature(self) -> None:
        """Bring ``temp`` back into [0.001, 0.5]; the loop calls it after every optimiser step."""
        with torch.no_grad():
            self.temp.clamp_(MIN_TEMPERATURE, MAX_TEMPERATURE)

    def text_mask(self, ids: torch.Tensor) -> torch.Tensor:
        """(n, L) bool, False on padding. By length: a pad id may be a real word's."""
        return torch.arange(ids.shape[1], device=ids.device) < self.tokenizer.lengths(ids)[:, None]

    def encode_image(self, pixels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(B, 3, H, W) prepared pictures -> tokens (B, P, image_width), embedding (B, e) of length 1."""
        visual: Any = self.clip.visual
        tokens, pooled = coca.image_tokens(self.clip, pixels) if self.captions else _image_tokens(visual, pixels)
        return tokens, F.normalize(pooled.float(), dim=-1)

    def encode_text(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(B, L) ids without [MASK] -> two-way tokens (B, L, text_width), embedding (B, e) of length 1."""
        tokens = self.text_tokens(ids)
        pooled = self.text.pooled(ids, self.tokenizer.lengths(ids), tokens)
        return tokens, F.normalize(pooled.float(), dim=-1)

    def text_tokens(self, ids: torch.Tensor) -> torch.Tensor:
        """(B, L) ids, [MASK] allowed -> two-way tokens (B, L, text_width); nothing is pooled."""
        return self.text.tokens(ids, self.text_mask(ids))

    def embed_texts(self, ids: torch.Tensor) -> torch.Tensor:
        """The embedding of `encode_text` alone, without the second pass where the two differ."""
        if self.captions:
            return self.caption_tokens(ids)[1]
        tokens = self.text_tokens(ids) if self.text.two_way else torch.empty(0)
        return F.normalize(self.text.pooled(ids, self.tokenizer.lengths(ids), tokens).float(), dim=-1)

    def caption_tokens(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of a CoCa: (B, L) ids -> causal tokens, as `captioning_loss` takes them, and the embedding (B, e)."""
        pooled, tokens = coca.text_features(self.clip, ids, self.tokenizer)
        return tokens, F.normalize(pooled.float(), dim=-1)

    def captioning_loss(self, tokens: torch.Tensor, image_tokens: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Of a CoCa: how badly its decoder predicts the captions ``ids`` (B, L) from their images; ()."""
        return coca.captioning_loss(self.clip, tokens, image_tokens, ids, self.tokenizer)

    def image_keys(self, image_tokens: torch.Tensor) -> Keys:
        """Cross-attention keys and values of every fusion layer, once for each image."""
        return [block.cross_attention.keys(image_tokens) for block in self.fusion]  # type: ignore[union-attr, operator]

    def fuse(
        self,
        text_tokens: torch.Tensor,
        text_mask: torch.Tensor,
        keys: Keys,
        image_rows: torch.Tensor,
        *,
        first_only: bool = False,
    ) -> torch.Tensor:
        """Fuse text rows with images: row r reads the image ``image_rows[r]`` of ``keys``.

        Args:
            text_tokens: (n, L, text_width) two-way tokens. text_mask: (n, L) bool, False on padding.
            keys: of `image_keys`. image_rows: (n,) int64.
            first_only: compute the last layer at position 0 alone, which is all that `itm_logits` reads.

        Returns:
            (n, L, text_width), or (n, 1, text_width) with ``first_only``.
        """
        x, mask = text_tokens, text_mask[:, None, None, :]
        for i, (block, layer_keys) in enumerate(zip(self.fusion, keys, strict=True)):
            last = first_only and i == len(keys) - 1
            arguments = (x, mask, layer_keys.index_select(0, image_rows), last)
            if self.config.grad_checkpointing and torch.is_grad_enabled():
                x = checkpoint(block, *arguments, use_reentrant=False)
            else:
                x = block(*arguments)
        return self.fusion_norm(x)  # type: ignore[no-any-return]

    def itm_logits(self, fused: torch.Tensor) -> torch.Tensor:
        """(n, L, d) fused rows -> (n, 2); index 1 is "matched"."""
        return self.itm_head(fused[:, 0])  # type: ignore[no-any-return]

    def mlm_logits(self, fused: torch.Tensor) -> torch.Tensor:
        """(..., d) fused positions -> (..., vocabulary). Pass the masked positions alone: the output is wide."""
        return F.linear(self.mlm_transform(fused), self.text.vocabulary_matrix, self.mlm_bias)


def build_model(config: ModelConfig) -> VLModel:
    """Make the model that a config describes, with its checkpoint's weights where one is named.

    Raises:
        InputError: unknown architecture (names the nearest), tag or file; a kind of text tower that cannot be used.
    """
    return _build(config, load_weights=True)


def _build(config: ModelConfig, *, load_weights: bool) -> VLModel:
    import open_clip

    tiny.register()
    name = config.architecture
    layout = architecture_layout(name, captions=True)
    pretrained = config.pretrained if load_weights else None
    tag = open_clip.get_pretrained_cfg(name, pretrained) if pretrained else {}
    # With the other activation a checkpoint is worth much less, and open_clip only warns.
    config = replace(config, quick_gelu=config.quick_gelu or bool(tag.get("quick_gelu")))
    try:
        with without_warnings():
            clip = open_clip.create_model(
                name,
                pretrained=pretrained,
                force_quick_gelu=config.quick_gelu,
                # Asking for the size that it has anyway would resize the position embedding of timm's towers.
                force_image_size=None if config.image_size == layout["vision_cfg"]["image_size"] else config.image_size,
                force_preprocess_cfg=None if tag else _preprocess(config),
                pretrained_image=False,
            )
    except Exception as error:
        if pretrained is None:
            raise
        raise InputError(_bad_checkpoint(name, pretrained, error)) from error
    if coca.is_coca(clip) and pretrained is None:
        coca.start_decoder(clip)
    context, vocabulary = layout["text_cfg"].get("context_length", 77), layout["text_cfg"].get("vocab_size", 49408)
    tokenizer = tiny_tokenizer(context) if name == tiny.TINY else open_clip_tokenizer(name, context, vocabulary)
    return VLModel(clip, tokenizer, _resolved(config, clip))


@contextmanager
def without_warnings() -> Iterator[None]:
    """open_clip warns through the root logger that a model made without a checkpoint has random weights."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
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
    tiny.TINY: {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5), "resize_mode": "squash"}
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
        return f"{pretrained}: cannot be loaded as {name}: {' '.join(str(error).split())[:300]}"
    known = f"; its tags: {', '.join(tags)}" if tags else ""
    return f"{name}: {pretrained!r} is neither a file nor a tag of it{nearest(pretrained, tags)}{known}"


def _resolved(config: ModelConfig, clip: nn.Module) -> ModelConfig:
    """The config with every default filled in from the model that was built."""
    visual: Any = clip.visual
    preprocess = {k: list(v) if isinstance(v, tuple) else v for k, v in visual.preprocess_cfg.items()}
    size = preprocess["size"]
    tiny_one = config.architecture == tiny.TINY
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
        model = _build(ModelConfig(**stored), load_weights=False)
        model.load_state_dict(tensors)
    except (RuntimeError, TypeError, ValueError, KeyError, AttributeError) as error:
        # A config that is none fails wherever it is used first.
        raise InputError(f"{path}: damaged, not a whole model ({' '.join(str(error).split())[:200]})") from error
    return model.eval()
