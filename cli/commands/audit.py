"""``fnpipe audit``."""

from __future__ import annotations

import sys
from dataclasses import asdict, replace

from fnpipe.cli.app import JsonFlag, WorkspaceArgument, emit
from fnpipe.cli.options import Given, flags_of
from fnpipe.mining.connections.config import MineConfig
from fnpipe.mining.views.config import AuditConfig
from fnpipe.pipeline.machine.shown import shown
from fnpipe.train.judges.specs import embeddings_for, load_discriminator


@flags_of(AuditConfig)
def audit_command(workspace: WorkspaceArgument, *, given: Given, as_json: JsonFlag = False) -> None:
    """Show how similar the hardest in-batch negatives are, random against GRIT, and how many of them are true.

    Example: fnpipe audit WORKSPACE --truth truth.parquet --plot audit.html
    """
    config = AuditConfig(**given)
    from fnpipe.mining.data.truth import Truth
    from fnpipe.mining.views.audit import audit, discriminator_judge
    from fnpipe.mining.views.audit_plot import check_plot_path, table, write_plot
    from fnpipe.pipeline.workspace.workspace import Workspace
    from fnpipe.train.runs.directory import reading_runs

    opened = Workspace.open(workspace)
    plot = check_plot_path(config.plot) if config.plot is not None else None
    truth = Truth.read(config.truth, opened) if config.truth is not None else None
    judges = {}
    if (spec := config.discriminator) is not None:
        config = replace(config, embeddings=embeddings_for(spec, opened, config.embeddings))
        by = MineConfig(embeddings=config.embeddings, tau_high=config.threshold)
        with reading_runs(opened, [spec], "fnpipe audit"):
            con_d = load_discriminator(spec, opened, by)  # torch loads here
        judges[spec] = discriminator_judge(opened, config.embeddings, con_d, config.threshold)
    result = audit(opened, config, truth, judges)
    if plot is not None:
        write_plot(result, plot)

    def render() -> None:
        _print_figures(table(result), f"similarity of hardest in-batch negatives, batches of {result.batch_size}")
        for what, why in result.skipped.items():
            print(f"{what if what.startswith('groups/') else f'M = {what}'} left out: {why}")
        for note in result.notes:
            print(shown(f"note: {note}", most=1000))
        if plot is not None:
            print(f"plot: {shown(plot)}")

    emit(asdict(result), as_json, render)


def _print_figures(lines: list[list[str]], title: str) -> None:
    """A table of figures, its headings first."""
    from rich.console import Console
    from rich.table import Table

    printed = Table(title=title, caption="harder: more similar to the anchor than its own partner", box=None)
    for column in lines[0]:
        printed.add_column(column, justify="left" if column == "batches" else "right", no_wrap=True)
    for line in lines[1:]:
        printed.add_row(*line)
    # A file or a pipe has no width; a terminal's own may be too narrow, and then the reader can widen it.
    Console(width=None if sys.stdout.isatty() else 170, markup=False).print(printed)
