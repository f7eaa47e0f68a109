"""Two steps of sentence-transformers' trainer over an export: ``DATA WORK``; prints what the model was given."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from datasets import load_dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.losses import MultipleNegativesRankingLoss
from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel, CLIPProcessor, CLIPTokenizer

SIZE = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


def tiny_clip(directory: Path) -> str:
    """An untrained CLIP over 16 x 16 pixels and single letters, saved as sentence-transformers loads it."""
    directory.mkdir(parents=True)
    letters = "abcdefghijklmnopqrstuvwxyz0123456789,."
    tokens = [*letters, *(f"{letter}</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    (directory / "vocab.json").write_text(json.dumps({token: i for i, token in enumerate(tokens)}))
    (directory / "merges.txt").write_text("#version: 0.2\n")
    tokenizer = CLIPTokenizer(str(directory / "vocab.json"), str(directory / "merges.txt"), model_max_length=77)
    end = len(tokens) - 1
    ids = {"bos_token_id": end - 1, "eos_token_id": end, "pad_token_id": end}
    text = {**SIZE, **ids, "vocab_size": len(tokens), "max_position_embeddings": 77}
    config = CLIPConfig(text_config=text, vision_config={**SIZE, "image_size": 16, "patch_size": 8}, projection_dim=8)
    CLIPModel(config).save_pretrained(directory / "clip")
    pictures = CLIPImageProcessor(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})
    CLIPProcessor(image_processor=pictures, tokenizer=tokenizer).save_pretrained(directory / "clip")
    SentenceTransformer(str(directory / "clip")).save(str(directory / "saved"))
    return str(directory / "saved")


def main(data: str, work: str) -> None:
    model = SentenceTransformer(tiny_clip(Path(work) / "model"))
    given: list[tuple[str, list[str]]] = []
    preprocess = model.preprocess

    def noting(inputs, *args, **kwargs):
        out = preprocess(inputs, *args, **kwargs)
        given.append((type(inputs[0]).__name__, sorted(out)))
        return out

    model.preprocess = noting
    arguments = SentenceTransformerTrainingArguments(
        output_dir=f"{work}/out",
        max_steps=2,
        per_device_train_batch_size=2,
        learning_rate=0.01,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        save_strategy="no",
    )
    before = {name: value.clone() for name, value in model.state_dict().items()}
    triplets = load_dataset(data, "triplets", split="train", cache_dir=f"{work}/cache")
    loss = MultipleNegativesRankingLoss(model)
    trainer = SentenceTransformerTrainer(model=model, args=arguments, train_dataset=triplets, loss=loss)
    result = trainer.train()
    moved = [name for name, value in model.state_dict().items() if not value.equal(before[name])]
    print(json.dumps({"loss": result.training_loss, "given": given, "moved": moved}))


if __name__ == "__main__":
    main(*sys.argv[1:])
