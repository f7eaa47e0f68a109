"""Models for open_clip: it loads them, and gives the embeddings that we give."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import open_clip
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image
from test_model import add_architecture, small_clip  # noqa: F401

from conftest import ROOT, MakeWorkspace
from fnpipe.cli.main import run as run_cli
from fnpipe.pipeline.errors import InputError
from fnpipe.train.keys import TINY
from fnpipe.train.model import export_open_clip as export
from fnpipe.train.model.build import build_model, save_model
from fnpipe.train.model.config import ModelConfig
from fnpipe.train.model.export_open_clip import export_model
from fnpipe.train.model.load import load_run
from fnpipe.train.model.model import VLModel

GUIDE = ROOT / "docs" / "guide" / "models.md"
CAPTIONS = ["a small red circle", "", "日本 & naïve CAFÉ's 3rd [MASK]", "!!! ! 0", "many words " * 60]


def built(architecture: str = TINY, **options: Any) -> VLModel:
    """A model with weights that no initialisation gives, so that a bias or a norm left behind shows."""
    torch.manual_seed(0)
    model = build_model(ModelConfig(architecture=architecture, fusion_layers=1, **options)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape))
        model.temp.fill_(0.03)
    return model


def assert_equal_in_open_clip(model: VLModel, directory: Path) -> Any:
    """Pictures from their files and captions from their text, through each library's own preparation."""
    clip, _, preprocess = open_clip.create_model_and_transforms(f"local-dir:{directory}")
    clip.eval()
    pictures = [np.random.default_rng(i).integers(0, 256, (50, 70 + 30 * i, 3), np.uint8) for i in range(2)]
    with torch.inference_mode():
        theirs = torch.stack([preprocess(Image.fromarray(p)) for p in pictures])
        ours = model.transform.normalise(torch.stack([model.transform(p) for p in pictures]))
        # Resizing may differ by one step of 1/255, see `Transform`.
        torch.testing.assert_close(theirs, ours, atol=0.02, rtol=0)
        images = clip.encode_image(ours, normalize=True)
        torch.testing.assert_close(images, model.encode_image(ours)[1], atol=1e-5, rtol=0)
        ids = open_clip.get_tokenizer(f"local-dir:{directory}")(CAPTIONS)
        texts = clip.encode_text(ids, normalize=True)
        torch.testing.assert_close(texts, model.embed_texts(model.tokenizer(CAPTIONS)), atol=1e-5, rtol=0)
    # Not one vector for all, which would be equal whatever went wrong.
    assert (texts @ texts.T - torch.eye(len(texts))).max() < 1 - 1e-4
    assert float(clip.logit_scale.detach().exp()) == pytest.approx(1 / 0.03, rel=1e-5)
    return clip


# ------------------------------------------------------------------------------------------------ the kinds of towers
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "clip": ({}, {}, {}),
    "clip-quick-gelu-resized": ({}, {}, {"quick_gelu": True, "image_size": 48}),
    "clip-nonscalar": ({}, {"nonscalar_logit_scale": True}, {}),
    "custom-text": ({"proj_bias": True}, {"custom_text": True}, {}),
    "sigmoid-last": (
        {"pool_type": "last", "no_causal_mask": True, "proj_bias": True, "context_length": 20},
        {"custom_text": True, "init_logit_bias": -10},
        {"itc_loss": "sigmoid"},
    ),
    "last-with-an-unused-bias": (
        {"pool_type": "last", "no_causal_mask": True, "context_length": 20},
        {"custom_text": True, "init_logit_bias": -10},
        {},
    ),
    "clip-by-sigmoid": ({}, {}, {"itc_loss": "sigmoid"}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_open_clip_gives_the_embeddings_of_a_model_with_the_towers_own_mask(kind: str, add_architecture, tmp_path):  # noqa: F811
    text, layout, options = KINDS[kind]
    name = add_architecture(f"small-{kind}", small_clip(**text) | layout)
    preprocess = {"mean": (0.5, 0.4, 0.3), "std": (0.2, 0.3, 0.4), "interpolation": "bilinear", "resize_mode": "squash"}
    model = built(name, text_attention="own", preprocess=preprocess, **options)
    exported = export_model(model, tmp_path / "out")
    clip = assert_equal_in_open_clip(model, tmp_path / "out")
    assert exported.needs is None
    assert exported.difference < 1e-5
    if "itc_loss" in options:
        assert float(clip.logit_bias.detach()) == exported.logit_bias == pytest.approx(float(model.bias.detach()))
    else:
        assert clip.logit_bias is exported.logit_bias is None


def test_a_tokenizer_of_the_transformers_package_comes_along(add_architecture, tmp_path):  # noqa: F811
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    words = ["<pad>", "</s>", "<unk>", "a", "small", "red", "circle", "many", "words"]
    pieces = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    pieces.pre_tokenizer = pre_tokenizers.Whitespace()
    pieces.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    wrapped = transformers.PreTrainedTokenizerFast(
        tokenizer_object=pieces, eos_token="</s>", pad_token="<pad>", unk_token="<unk>"
    )
    wrapped.save_pretrained(tmp_path / "tokenizer")
    text = {"pool_type": "last", "no_causal_mask": True, "context_length": 12, "vocab_size": len(words)}
    text |= {"hf_tokenizer_name": str(tmp_path / "tokenizer"), "tokenizer_kwargs": {"clean": "canonicalize"}}
    layout = small_clip(**text) | {"custom_text": True, "init_logit_bias": -10}
    model = built(add_architecture("small-words", layout), text_attention="own", itc_loss="sigmoid")
    export_model(model, tmp_path / "out")
    assert_equal_in_open_clip(model, tmp_path / "out")


@pytest.mark.parametrize("text_attention", ["own", "bidirectional"])
def test_fnpipe_tiny_is_exported_under_either_mask(text_attention: str, tmp_path):
    model = built(text_attention=text_attention)
    assert export_model(model, tmp_path / "out").needs == "fnpipe.train.model.tiny"
    assert_equal_in_open_clip(model, tmp_path / "out")


def test_a_two_way_model_with_clips_words_that_pools_the_first_position_is_exported(add_architecture, tmp_path):  # noqa: F811
    text = {"pool_type": "first", "no_causal_mask": True}
    for custom in (True, False):
        name = add_architecture(f"small-albef-{custom}", small_clip(**text) | {"custom_text": custom})
        model = built(name)
        assert model.text.two_way
        export_model(model, tmp_path / name)
        assert_equal_in_open_clip(model, tmp_path / name)


@pytest.fixture(scope="module")
def clip_words_in_both_forms(tmp_path_factory) -> Any:
    """Our tokenizer of CLIP's vocabulary, and open_clip's of the same, written out to be padded with its end."""
    from fnpipe.train.model.tokenizer import open_clip_tokenizer, write_tokenizer

    directory = tmp_path_factory.mktemp("words")
    ours = open_clip_tokenizer("ViT-B-32", 24, 49408)
    text = {"context_length": 24, **write_tokenizer(ours, directory, pad_with_end=True)}
    (directory / "open_clip_config.json").write_text(json.dumps({"model_cfg": {"text_cfg": text}}))
    return ours, open_clip.get_tokenizer(f"local-dir:{directory}")


@settings(max_examples=300)
@example(caption="<END_OF_TEXT> is 2 words' <start_of_text>")
# Libraries differ over which kind of character an unassigned one is.
@given(caption=st.text(st.characters(exclude_categories=["Cs", "Cn"]), max_size=40))
def test_clips_words_are_the_same_in_either_form(caption: str, clip_words_in_both_forms):
    ours, theirs = clip_words_in_both_forms
    ids = ours([caption])
    padded = torch.nn.functional.pad(ids, (0, 24 - ids.shape[1]), value=ours.eot_id)
    assert theirs([caption]).tolist() == padded.tolist()


# ------------------------------------------------------------------------------------------------ what is refused
def test_a_two_way_model_that_pools_the_end_is_refused_with_the_way_out(add_architecture, tmp_path):  # noqa: F811
    model = built(add_architecture("small-clip", small_clip()))
    with pytest.raises(InputError, match="--set text_attention=own") as caught:
        export_model(model, tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_resized_tower_of_timms_is_refused(add_architecture, tmp_path):  # noqa: F811
    vision = {"timm_model_name": "vit_tiny_patch16_224", "timm_pool": "token", "image_size": 224}
    name = add_architecture("small-timm", small_clip() | {"vision_cfg": vision})
    export_model(built(name, text_attention="own"), tmp_path / "out")
    with pytest.raises(InputError, match="64 px"):
        export_model(built(name, text_attention="own", image_size=64), tmp_path / "other")


def test_embeddings_that_differ_are_not_left_behind(tmp_path, monkeypatch: pytest.MonkeyPatch):
    real = export._towers
    monkeypatch.setattr(export, "_towers", lambda model: {k: v * 1.01 for k, v in real(model).items()})
    with pytest.raises(InputError, match="other embeddings"):
        export_model(built(), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------------------------ runs
@pytest.fixture
def trained(make_workspace: MakeWorkspace) -> tuple[Path, VLModel]:
    """A workspace with the run ``mafa``."""
    root = make_workspace(4).root
    model = built()
    directory = root / "runs" / "mafa"
    (directory / "checkpoints").mkdir(parents=True)
    (directory / "config.json").write_text("{}")
    save_model(model, directory / "checkpoints" / "last.safetensors")
    return root, model


def test_the_command_writes_a_new_directory_and_says_how_to_load_it(trained, tmp_path, capsys):
    root, model = trained
    out = tmp_path / "out"
    out.mkdir()
    assert run_cli(["export-model", str(root), str(out), "--run", "mafa", "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert (summary["run"], summary["model"], summary["path"]) == ("mafa", "fnpipe-tiny", str(out))
    assert summary["logit_scale"] == pytest.approx(1 / 0.03, rel=1e-5)
    assert_equal_in_open_clip(model, out)
    assert run_cli(["export-model", str(root), str(out), "--run", "mafa"]) == 2
    assert "holds something already" in capsys.readouterr().err
    assert run_cli(["export-model", str(root), str(tmp_path / "b"), "--run", "maffa"]) == 2
    assert "did you mean 'mafa'" in capsys.readouterr().err
    assert run_cli(["export-model", str(root), str(tmp_path / "b"), "--run", "mafa", "--checkpoint", "best"]) == 2
    assert "it has last" in capsys.readouterr().err
    assert run_cli(["export-model", str(root), str(tmp_path / "b"), "--run", "mafa"]) == 0
    line = capsys.readouterr().out.split("In Python: ")[1].strip()
    assert subprocess.run([sys.executable, "-c", line], capture_output=True, check=False).returncode == 0


def test_the_mask_that_train_was_told_is_that_of_the_run(make_workspace: MakeWorkspace, tmp_path, capsys):
    root = make_workspace(8).root
    fast = ["--epochs", "1", "--threads", "1", "--set", "batch_size=4", "--set", "tensorboard=false"]
    for name, told, mask in (("a", ["--set", "text_attention=own"], "own"), ("b", [], "bidirectional")):
        assert run_cli(["train", str(root), "--method", "itc", "--run", name, *fast, *told]) == 0
        assert load_run(root / "runs" / name).config.text_attention == mask
        assert json.loads((root / "runs" / name / "config.json").read_text())["config"]["text_attention"] == mask
        assert run_cli(["export-model", str(root), str(tmp_path / name), "--run", name]) == 0
    assert run_cli(["train", str(root), "--method", "itc", "--run", "c", "--set", "text_attention=owm"]) == 2
    assert "did you mean 'own'" in capsys.readouterr().err


def python_block(word: str) -> str:
    """The guide's Python example in which ``word`` stands."""
    blocks = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    return str(next(block for block in blocks if word in block))


def test_the_guides_example_embeds_and_scores(trained, tmp_path, monkeypatch: pytest.MonkeyPatch):
    root, model = trained
    (tmp_path / "work").symlink_to(root)
    Image.new("RGB", (80, 60), (200, 30, 30)).save(tmp_path / "picture.jpg")
    monkeypatch.chdir(tmp_path)
    found: dict[str, Any] = {}
    exec(python_block("load_run"), found)
    pixels = model.transform.normalise(model.transform(np.asarray(Image.open("picture.jpg")))[None])
    assert found["similarity"].shape == (1, 2)
    torch.testing.assert_close(found["image"], model.encode_image(pixels)[1].detach())
    assert ((found["match"] > 0) & (found["match"] < 1)).all()
    assert found["match"].shape == (2,)


def test_the_guides_open_clip_example_loads_what_the_command_wrote(trained, tmp_path, monkeypatch: pytest.MonkeyPatch):
    root, model = trained
    assert run_cli(["export-model", str(root), str(tmp_path / "for-open-clip"), "--run", "mafa"]) == 0
    monkeypatch.chdir(tmp_path)
    found: dict[str, Any] = {}
    exec(python_block("local-dir:"), found)
    texts = found["model"].encode_text(found["tokenizer"](["a red circle"]), normalize=True)
    torch.testing.assert_close(texts, model.embed_texts(model.tokenizer(["a red circle"])), atol=1e-5, rtol=0)


def test_load_run_is_at_hand_and_importing_the_package_loads_no_torch():
    code = "import sys, fnpipe.train as t; assert 'torch' not in sys.modules; t.load_run; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"
    import fnpipe.train

    assert fnpipe.train.load_run is load_run
    with pytest.raises(AttributeError, match="lode_run"):
        fnpipe.train.lode_run  # noqa: B018
