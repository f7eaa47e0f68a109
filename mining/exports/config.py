"""What ``fnpipe export`` is asked: its flags, checked."""

from __future__ import annotations

from dataclasses import MISSING, dataclass

from fnpipe.pipeline.errors import InputError, nearest
from fnpipe.pipeline.flags import flag

# Edges that people are asked about, here and by `fnpipe review`.
TO_ASK = 300
FORMS = ("open_clip", "sentence-transformers", "hf", "label-studio", "fiftyone")


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """What is written for whom: one field per flag."""

    to: str = flag(MISSING, "open_clip, sentence-transformers, hf; or for looking, label-studio or fiftyone.")
    edges: str | None = flag(None, "Which edges; the only ones there are if not given.")
    identity: bool = flag(True, "Leave out positives that the identity rule found.")
    count: int | None = flag(None, f"Edges to ask people about (label-studio). Default: {TO_ASK}.")
    push: str | None = flag(None, "Upload it to this data set of the Hugging Face Hub (hf).", metavar="OWNER/NAME")

    def __post_init__(self) -> None:
        if self.to not in FORMS:
            raise InputError(f"--to {self.to}: one of {', '.join(FORMS)}{nearest(self.to, list(FORMS))}")
        if self.count is not None and self.to != "label-studio":
            raise InputError(f"--count {self.count}: only with --to label-studio, not with --to {self.to}")
        if self.count is not None and self.count < 1:
            raise InputError(f"--count {self.count}: at least 1")
        if self.to == "label-studio" and not self.identity:
            raise InputError("--no-identity: people are asked about what the discriminator judged; leave it out")
        if self.push is None:
            return
        if self.to != "hf":
            raise InputError(f"--push: only with --to hf, not with --to {self.to}")
        owner, slash, name = self.push.partition("/")
        if not (owner and slash and name) or "/" in name:
            raise InputError(f"--push {self.push}: not OWNER/NAME")
