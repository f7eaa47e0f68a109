"""From a flag such as ``itm:RUN`` or ``run:NAME`` to the discriminator or encoder that it names."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from fnpipe.pipeline.errors import InputError

if TYPE_CHECKING:
    from fnpipe.mining.connections.config import MineConfig
    from fnpipe.mining.discriminators.protocol import AnyDiscriminator
    from fnpipe.mining.discriminators.similarity import LogisticFit, Similarity
    from fnpipe.pipeline.embed.encoder import Encoder
    from fnpipe.pipeline.workspace.workspace import Workspace

# Their p is far too sure of candidates, unless it was fitted.
UNCALIBRATED = ("clip", "vacsr")


def embeddings_for(spec: str, workspace: Workspace, named: str | None) -> str | None:
    """The embeddings that candidates are proposed and judged by: those named, else vacsr's own; None: the only ones."""
    if named is not None or spec.partition(":")[0] != "vacsr":
        return named
    from fnpipe.train.judges.vacsr import embeddings_of

    return embeddings_of(spec, workspace)


@contextmanager
def reading_judge(workspace: Workspace, spec: str, calibrate_on: str | None, command: str) -> Iterator[None]:
    """Hold the run that a ``--discriminator`` names, and the edges that it is calibrated on, while they are read."""
    from fnpipe.pipeline.workspace.workspace import reading
    from fnpipe.train.runs.directory import reading_runs

    named = [workspace.stage(f"edges/{name}") for name in workspace.names("edges") if name == calibrate_on]
    edges = {stage.name: stage.digest for stage in named}
    with reading_runs(workspace, [spec], command), reading(workspace, edges, command):
        yield


def load_discriminator(
    spec: str,
    workspace: Workspace,
    config: MineConfig,
    calibrate_on: str | None = None,
    device: str = "auto",
    precision: str = "auto",
) -> AnyDiscriminator:
    """The discriminator that a ``--discriminator`` names."""
    from fnpipe.pipeline.machine.device import pick_device

    kind, _, model = spec.partition(":")
    on = pick_device(device)
    if spec == "clip":
        return _load_clip(workspace, config, calibrate_on)
    if kind == "itm":
        from fnpipe.train.judges.itm import load_discriminator as load_itm

        return load_itm(spec, workspace, on, precision)
    if kind == "vacsr":
        from fnpipe.train.judges.vacsr import load_vacsr

        con_d = load_vacsr(spec, workspace, config.embeddings, on)
        if calibrate_on is None:
            return con_d
        return con_d.fitted(_calibration(workspace, config, calibrate_on, con_d.logits))
    if kind == "blip":
        from fnpipe.mining.discriminators.blip import load_blip

        return load_blip(model, device, precision)
    from fnpipe.mining.discriminators.similarity import load_registered

    return load_registered(spec, workspace)


def _load_clip(workspace: Workspace, config: MineConfig, calibrate_on: str | None) -> AnyDiscriminator:
    from fnpipe.mining.discriminators.similarity import ClipDiscriminator, cosine, fit_on_recorded
    from fnpipe.pipeline.workspace.embeddings import Embeddings

    opened = Embeddings.open(workspace, config.embeddings)
    if calibrate_on is None:
        return ClipDiscriminator(opened, fit_on_recorded(workspace, opened))
    return ClipDiscriminator(opened, _calibration(workspace, config, calibrate_on, cosine))


def _calibration(workspace: Workspace, config: MineConfig, calibrate_on: str, similarity: Similarity) -> LogisticFit:
    """The curve over ``similarity`` that fits judged edges or a truth file."""
    from fnpipe.mining.connections.inputs import sample_candidates
    from fnpipe.mining.data.truth import Truth
    from fnpipe.mining.discriminators.similarity import FIT_SAMPLE, fit_on_edges, fit_on_truth
    from fnpipe.pipeline.workspace.embeddings import Embeddings

    opened = Embeddings.open(workspace, config.embeddings)
    if calibrate_on in workspace.names("edges"):
        judged = workspace.resolve("edges", calibrate_on, "--calibrate-on")
        return fit_on_edges(opened, judged, similarity=similarity)
    if not Path(calibrate_on).is_file():
        known = ", ".join(workspace.names("edges")) or "no edges"
        raise InputError(f"--calibrate-on {calibrate_on}: neither a truth file nor edges of {workspace.root} ({known})")
    truth, sample = Truth.read(calibrate_on, workspace), sample_candidates(workspace, config, FIT_SAMPLE)
    true = truth.matches(sample.image_ids, sample.pair_ids)
    name = Path(calibrate_on).name
    return fit_on_truth(opened, sample.image_ids, sample.pair_ids, true, name, similarity=similarity)


def load_encoder(
    model: str, workspace: Path, pretrained: str | None = None, device: str = "auto", precision: str = "auto"
) -> Encoder:
    """The encoder that a ``--model`` names: ``run:NAME`` of the workspace, ``demo``, or an open_clip model."""
    from fnpipe.pipeline.embed.open_clip import load_open_clip
    from fnpipe.pipeline.machine.device import pick_device

    if model != "demo" and not model.startswith("run:"):
        return load_open_clip(model, pretrained, device, precision)
    if pretrained:
        raise InputError(f"--model {model} brings its own weights; leave --pretrained {pretrained} out")
    from fnpipe.pipeline.workspace.workspace import Workspace
    from fnpipe.train.judges.encoder import load_encoder as load_own

    return load_own(model, Workspace.open(workspace), pick_device(device), precision)
