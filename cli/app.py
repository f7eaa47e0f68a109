"""The command line: one thin module per group of commands; here, how they end and how they print."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import typer

from fnpipe.pipeline.errors import InputError

app = typer.Typer(
    name="fnpipe",
    help="Find the false negatives in image-text data, and train vision-language models with them.",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

# What the system says of a path that a user has named: there is nothing to repair in the program.
_PATH_ERRORS = (FileNotFoundError, PermissionError, NotADirectoryError, IsADirectoryError, FileExistsError)

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


def main() -> None:
    """Run the command line. Exit codes: 0 done, 1 our fault or the machine's, 2 the input's or the flags'."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run one command and return its exit code; a user's mistake becomes one line on stderr."""
    from fnpipe.cli import commands  # noqa: F401  registers every command

    # typer carries its own copy of click in some versions; its exceptions are reached through these two.
    click_error = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")
    command = typer.main.get_command(app)
    try:
        # Not `command.main`, which would answer Ctrl-C and a closed pipe before us.
        with command.make_context("fnpipe", list(arguments) or ["--help"]) as context:
            command.invoke(context)
        sys.stdout.flush()
    except InputError as error:
        return _fail(str(error))
    except click_error as error:  # type: ignore[misc]
        return _fail(error.format_message())
    except typer.Exit as done:
        return int(done.exit_code)
    except (typer.Abort, KeyboardInterrupt):
        print("fnpipe: interrupted; run the same command again to continue", file=sys.stderr)
        return 1
    except BrokenPipeError:
        # The reader of our output (`head`) has gone: nothing is wrong, and nothing is left to say. Python would
        # complain when it flushes at exit, so what is left goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        return _fail_on_file(error)
    return 0


def _fail_on_file(error: OSError) -> int:
    """One line for what the system says of a file: a wrong path is the user's fault, a full disk the machine's."""
    if error.filename is None and error.errno is not None:
        raise error
    of_path = error.errno is None or isinstance(error, _PATH_ERRORS)
    what = str(error) if error.filename is None else f"{os.fspath(error.filename)}: {error.strerror}"
    code = _fail(f"{what}; check the path and the files below it" if of_path else what)
    return code if of_path else 1


def _fail(message: str) -> int:
    print("fnpipe: " + " ".join(message.split()), file=sys.stderr)
    return 2
