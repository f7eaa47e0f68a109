"""The command lines of the README and of the guide, run one after the other on a small data set.

What would be downloaded is replaced by what ships with fnpipe, and every training is one epoch. Lines on a Ray cluster
are left to the tests of that engine.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from fnpipe.cli.main import run
from fnpipe.pipeline.scenes.dataset import write_scenes

ROOT = Path(__file__).parent.parent
# In the order in which a reader may follow them; a line that stands on several is run once.
PAGES = (
    "README.md",
    "docs/guide/own-data.md",
    "docs/guide/sources.md",
    "docs/guide/choosing.md",
    "docs/guide/trust.md",
    "docs/guide/avoiding.md",
    "docs/guide/frozen-features.md",
    "docs/guide/scaling.md",
    "docs/guide/models.md",
    "docs/guide/damage.md",
)
REPLACED = {
    "--model ViT-B-32 --pretrained laion2b_s34b_b79k": "--model demo --name clip",
    "--model ViT-B-32 --init laion2b_s34b_b79k": "--init demo",
    "--discriminator blip:Salesforce/blip-itm-base-coco": "--discriminator itm:demo",
    "--nproc_per_node=8": "--nproc_per_node=2",
}


def chain() -> list[str]:
    """The command lines of the pages, as they are run here."""
    blocks = [block for page in PAGES for block in re.findall(r"```sh\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)]
    text = "\n".join(blocks).replace("\\\n", " ")
    for shown, here in REPLACED.items():
        assert shown in text, f"{shown} stands on no page any more"
        text = text.replace(shown, here)
    lines = [" ".join(line.split(" #")[0].split()) for line in text.splitlines()]
    # Edges are named after what judged them.
    lines = [
        f"{line} --name blip" if "connections work --discriminator itm:demo" in line and "--name" not in line else line
        for line in lines
    ]
    ours = [line for line in lines if line.startswith(("fnpipe ", "torchrun ")) and not left_out(line)]
    return list(dict.fromkeys(ours))


def left_out(line: str) -> bool:
    """Whether a line needs a cluster, a network, or COCO's pictures; tests of their own run what it names."""
    return any(word in line for word in ("--engine ray", "hf:", "--eccv", "fnpipe demo"))


def write_sources(directory: Path) -> None:
    """Everything the pages read: a list of pairs, COCO annotations, tars of img2dataset's form, and a table."""
    write_scenes(directory / "images", 300, seed=5)
    (directory / "images" / "pairs.json").rename(directory / "pairs.json")
    pairs = json.loads((directory / "pairs.json").read_text())[:20]
    (directory / "train2017").symlink_to(directory / "images" / "pictures")
    names = [Path(pair["image"]).name for pair in pairs]
    coco = {
        "images": [{"id": i, "file_name": name} for i, name in enumerate(names)],
        "annotations": [{"id": i, "image_id": i, "caption": pair["caption"]} for i, pair in enumerate(pairs)],
    }
    (directory / "captions_train2017.json").write_text(json.dumps(coco))
    rows = [f'{pair["image"]},"{pair["caption"]}"' for pair in pairs]
    (directory / "pairs.csv").write_text("\n".join(["file,title", *rows]))
    (directory / "laion").mkdir()
    for shard in range(10):
        with tarfile.open(directory / "laion" / f"{shard:05d}.tar", "w") as tar:
            for i in (2 * shard, 2 * shard + 1):
                caption = directory / "caption.txt"
                caption.write_text(pairs[i]["caption"])
                tar.add(directory / "images" / pairs[i]["image"], f"{i:09d}.png")
                tar.add(caption, f"{i:09d}.txt")


def test_every_line_of_the_readme_and_the_guide_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_sources(tmp_path)
    monkeypatch.chdir(tmp_path)
    lines = chain()
    assert len(lines) > 20
    for line in lines:
        words = shlex.split(line)
        if "train" in words:
            words += ["--epochs", "1"]
        if words[0] == "torchrun":
            command = [sys.executable, "-m", "torch.distributed.run", *words[1:]]
            assert subprocess.run(command, check=False).returncode == 0, line
        else:
            assert words[0] == "fnpipe"
            assert run(words[1:]) == 0, line
    assert {path.name for path in Path("work/runs").iterdir()} >= {
        "mafa",
        "mafa-8",
        "adapter",
        "vacsr",
    }
    assert {path.name for path in Path("own/runs").iterdir()} >= {"con-d", "student"}
