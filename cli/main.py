"""The whole command line: every command by its name, run, and ended with its exit code."""

from __future__ import annotations

import errno
import io
import os
import sys
import traceback
from functools import cache
from types import FrameType
from typing import Any

import typer

from fnpipe.cli.app import _LONGEST_LINE, app
from fnpipe.cli.commands.audit import audit_command
from fnpipe.cli.commands.build_graph import build_graph_command
from fnpipe.cli.commands.demo import demo_command
from fnpipe.cli.commands.embed import embed_command
from fnpipe.cli.commands.evaluate import evaluate_command
from fnpipe.cli.commands.export import export_command, export_model_command
from fnpipe.cli.commands.group import group_command
from fnpipe.cli.commands.inspect import inspect_command, review_command
from fnpipe.cli.commands.mine_connections import mine_connections_command, relabel_command
from fnpipe.cli.commands.prepare import prepare_command
from fnpipe.cli.commands.report import report_command
from fnpipe.cli.commands.shard import shard_command
from fnpipe.cli.commands.status import doctor_command, status_command
from fnpipe.cli.commands.train import train_command
from fnpipe.pipeline.errors import InputError
from fnpipe.pipeline.machine.shown import shown

# In the order in which the help lists them.
COMMANDS = (
    shard_command,
    status_command,
    demo_command,
    doctor_command,
    embed_command,
    build_graph_command,
    group_command,
    audit_command,
    mine_connections_command,
    relabel_command,
    prepare_command,
    inspect_command,
    review_command,
    export_command,
    report_command,
    train_command,
    evaluate_command,
    export_model_command,
)
for command in COMMANDS:
    app.command(command.__name__.removesuffix("_command").replace("_", "-"))(command)

# What the system says of a path; where the user has named it, there is nothing to repair in the program.
_PATH_ERRORS = (FileNotFoundError, PermissionError, NotADirectoryError, IsADirectoryError, FileExistsError)

# What the system says when the machine is at its end.
_MACHINE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EFBIG)


def main() -> None:
    """Run the command line. Exit codes: 0 done, 1 our fault or the machine's, 2 the input's or the flags'."""
    for stream in (sys.stdout, sys.stderr):
        # A file may be named by bytes that are no text.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    if "_FNPIPE_COMPLETE" in os.environ:
        app(prog_name="fnpipe")  # Answers the shell, and ends.
    sys.exit(run(sys.argv[1:]))


@cache
def _program() -> Any:
    """The commands as click has them, made from their signatures once."""
    return typer.main.get_command(app)


def run(arguments: list[str]) -> int:
    """Run one command and return its exit code; a user's mistake becomes one line on stderr."""

    # typer carries its own copy of click in some versions; its exceptions are reached through these two.
    click_error = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")
    command = _program()
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
        return _fail_on_file(error, arguments)
    except MemoryError as error:
        _fail(
            f"out of memory{f' ({error})' if str(error) else ''}; what is finished is kept: run the same command again"
        )
        return 1
    return 0


def _fail_on_file(error: OSError, arguments: list[str]) -> int:
    """One line for what the system says of a file: a wrong path is the user's fault, all else the machine's or ours."""
    name = None if error.filename is None else os.fspath(error.filename)
    what = str(error) if name is None else f"{name}: {error.strerror}"
    if error.errno in _MACHINE:
        _fail(f"{what}; what is finished is kept: put it right and run the same command again")
        return 1
    if error.errno in (None, errno.ENAMETOOLONG) or (
        isinstance(error, _PATH_ERRORS) and _is_named(name or what, arguments)
    ):
        return _fail(f"{what}; check the path and the files below it")
    # Nobody but the program asked for this file.
    ours = [frame for frame, _ in traceback.walk_tb(error.__traceback__) if _module(frame).startswith("fnpipe.")]
    lines = dict(traceback.walk_tb(error.__traceback__))
    _fail(f"{what} ({type(error).__name__} in {_module(ours[-1])}, line {lines[ours[-1]]})")
    return 1


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _is_named(path: str, arguments: list[str]) -> bool:
    """Whether ``path`` is one that stands on the command line, or a part of the way to one."""
    given = [os.path.abspath(word.rpartition("=")[2]) for word in arguments]
    return any(f"{word}/".startswith(f"{os.path.abspath(path).rstrip('/')}/") for word in given)


def _fail(message: str) -> int:
    print("fnpipe: " + shown(" ".join(message.split()), _LONGEST_LINE), file=sys.stderr)
    return 2
