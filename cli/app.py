"""The command line: what its commands share, and how they print."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Annotated, Any, TypeVar

import typer
from typer.core import TyperCommand

from fnpipe.cli.completion import offer_names
from fnpipe.cli.options import check_given, check_once

_Function = TypeVar("_Function", bound=Callable[..., Any])


class _Command(TyperCommand):
    """A command that looks at what it is given before it begins, and so before torch is loaded."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        for parameter in self.params:
            offer_names(parameter)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if ctx.resilient_parsing:  # The shell asks what may follow: the line is not finished.
            return super().parse_args(ctx, args)
        given = self.make_parser(ctx).parse_args(list(args))[2] if args else []
        rest = super().parse_args(ctx, args)
        check_given(self.params, ctx.params)
        check_once(given)
        return rest


class _Commands(typer.Typer):
    def command(self, name: str | None = None, **options: Any) -> Callable[[_Function], _Function]:
        return super().command(name, **{"cls": _Command, **options})


app = _Commands(
    name="fnpipe",
    help="Find the false negatives in image-text data, and train vision-language models with them.",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

# Of an error: what is wrong, where, and the way out, which stands at its end.
_LONGEST_LINE = 2000

JsonFlag = Annotated[bool, typer.Option("--json", help="Print a machine-readable summary on stdout.")]
WorkspaceArgument = Annotated[str, typer.Argument(metavar="WORKSPACE", help="The workspace directory.")]
OverwriteFlag = Annotated[bool, typer.Option("--overwrite", help="Throw away what is there and start afresh.")]


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    """Find the false negatives in image-text data, and train vision-language models with them."""
    if version:
        from importlib.metadata import version as installed

        print(f"fnpipe {installed('fnpipe')}")
        raise typer.Exit


def emit(summary: Mapping[str, Any], as_json: bool, render: Callable[[], None]) -> None:
    """Print the result of a command: ``summary`` as one JSON object, or whatever ``render`` prints for people."""
    if as_json:
        print(json.dumps(summary, ensure_ascii=False, default=str))
    else:
        render()


def how_long(seconds: float) -> str:
    """A time ahead, as people say it."""
    if seconds < 120:
        return f"{seconds:,.0f} seconds"
    return f"{seconds / 60:,.0f} minutes" if seconds < 7200 else f"{seconds / 3600:,.1f} hours"
