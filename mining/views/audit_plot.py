"""The audit as a picture: the distribution of hardest in-batch similarities, by search space."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from fnpipe.mining.views.audit import Audit
from fnpipe.mining.views.known_shares import UNKNOWN
from fnpipe.mining.views.pages import render_page
from fnpipe.pipeline.errors import InputError
from fnpipe.pipeline.files import atomic
from fnpipe.pipeline.files.destination import destination

FORMATS = (".png", ".html")
TEMPLATE = Path(__file__).with_name("audit.html")


def check_plot_path(path: str) -> Path:
    """The path, if a plot can be written there in the format its ending names."""
    if Path(path).suffix not in FORMATS:
        raise InputError(f"--plot {path}: the name must end in {' or '.join(FORMATS)}")
    return destination(path)


def write_plot(audit: Audit, path: Path) -> None:
    """Write the plot as ``.png``, or as a page that needs no other file (``.html``)."""
    png = _png(audit)
    atomic.write_bytes(path, png if path.suffix == ".png" else _page(audit, png))


def _png(audit: Audit) -> bytes:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    centres = np.linspace(-1, 1, len(audit.rows[0].histogram) + 1)
    centres = (centres[:-1] + centres[1:]) / 2
    curves = {"recorded pairs": audit.recorded["histogram"]}
    curves |= {row.label: row.histogram for row in audit.rows}
    seen = np.zeros(len(centres), bool)
    for name, counts in curves.items():
        share = np.array(counts) / sum(counts)
        seen |= share > 0
        axes.plot(centres, share, label=name, linestyle="--" if name == "recorded pairs" else "-")
    axes.set_xlim(centres[seen].min() - 0.02, centres[seen].max() + 0.02)
    axes.set_xlabel("image-text similarity of the hardest in-batch negative")
    axes.set_ylabel("share")
    axes.set_title(f"{audit.embeddings}: batches of {audit.batch_size} of {audit.images:,} images")
    axes.legend(fontsize="small")
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    return buffer.getvalue()


def table(audit: Audit) -> list[list[str]]:
    """What a person reads of an audit: a line of headings, one for each row, and one for the recorded pairs."""
    judges, known = list(audit.rows[0].judged), audit.rows[0].known
    by_edges = [label if label == UNKNOWN else f"known {label}" for label in known] + ["forced"] if known else []
    lines = [["batches", "anchors", "mean", "p5", "p50", "p95", "harder", *judges, *by_edges]]
    for row in audit.rows:
        shares = [row.above_recorded, *row.judged.values(), *(row.known or {}).values()]
        cells = [row.label, f"{row.hardest:,}", *_spread(row.mean, row.quantiles)]
        cells += ["-" if share is None else f"{share:.2%}" for share in shares]
        forced = "-" if row.forced is None else f"{row.forced:,}"
        lines.append([*cells, *([forced] if known else [])])
    recorded = ["recorded pairs", "", *_spread(audit.recorded["mean"], audit.recorded["quantiles"])]
    return [*lines, recorded + [""] * (len(lines[0]) - len(recorded))]


def _spread(mean: float, quantiles: Mapping[str, float]) -> list[str]:
    return [f"{value:.3f}" for value in (mean, *(quantiles[q] for q in ("p5", "p50", "p95")))]


def _page(audit: Audit, png: bytes) -> bytes:
    title = f"Hardest in-batch negatives: {audit.embeddings}"
    return render_page(TEMPLATE, title, lines=table(audit), picture=base64.b64encode(png).decode())
