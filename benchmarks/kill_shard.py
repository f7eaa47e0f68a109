"""Kill `fnpipe shard` at random moments, finish it, and compare every byte with a run that was left alone.

    python benchmarks/kill_shard.py [--kills 20 --images 6000]

Each round starts a fresh workspace, kills the program (SIGKILL, when a random number of shards is done, and a little
later), and runs it again to the end. The last line of the output is one JSON object; ``identical`` counts the rounds
whose files were all the same.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from shard import write_pictures


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--kills", type=int, default=20)
    options.add_argument("--images", type=int, default=6_000)
    options.add_argument("--seed", type=int, default=0)
    chosen = options.parse_args()
    with tempfile.TemporaryDirectory(prefix="fnpipe-kill-") as directory:
        report = kill(Path(directory), chosen)
    print(json.dumps(report))
    sys.exit(0 if report["identical"] == chosen.kills else 1)


def kill(root: Path, chosen: argparse.Namespace) -> dict[str, int | float]:
    write_pictures(root / "source", (64, 64), chosen.images)
    (root / "source" / "pictures" / "000007.jpg").write_bytes(b"broken")
    start = time.monotonic()
    subprocess.run(command(root, root / "whole"), check=True, capture_output=True)
    whole_seconds = time.monotonic() - start
    whole = contents(root / "whole")
    planned = len(list((root / "whole" / "shards").glob("*.tar")))
    moments = random.Random(chosen.seed)
    identical = amid = 0
    for number in range(chosen.kills):
        workspace = root / "killed"
        shutil.rmtree(workspace, ignore_errors=True)
        process = subprocess.Popen(command(root, workspace), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        # From before the first shard to the last pass; the pause puts the kill anywhere between two of them.
        wanted = moments.randint(0, planned)
        while process.poll() is None and parts_done(workspace) < wanted:
            time.sleep(0.002)
        time.sleep(moments.uniform(0, 0.2))
        process.kill()
        process.wait()
        left = parts_done(workspace)
        amid += left > 0
        subprocess.run(command(root, workspace), check=True, capture_output=True)
        same = contents(workspace) == whole
        identical += same
        print(
            f"kill {number + 1}: {left} of {planned} parts were there; {'same' if same else 'OTHER'} bytes", flush=True
        )
    return {
        "kills": chosen.kills,
        "identical": identical,
        "killed_amid_shards": amid,
        "seconds": round(whole_seconds, 2),
    }


def command(root: Path, workspace: Path) -> list[str]:
    flags = ["--images-per-shard", "200", "--workers", "2", "--holdout", "0.1"]
    return [sys.executable, "-m", "fnpipe.cli", "shard", str(root / "source" / "pairs.json"), str(workspace), *flags]


def parts_done(workspace: Path) -> int:
    return sum(path.stem.isdigit() for path in workspace.glob("parts/*.parquet"))


def contents(workspace: Path) -> dict[str, str]:
    """The digest of every file but the manifest, which may hold times."""
    return {
        path.relative_to(workspace).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in workspace.rglob("*")
        if path.is_file() and path.name != "fnpipe.json"
    }


if __name__ == "__main__":
    main()
