"""The README: its command reference is complete, and every command line it shows can be parsed.

``python tests/test_readme.py`` writes the reference anew from the commands' own help.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer

from fnpipe.cli import main as commands  # noqa: F401  registers every command
from fnpipe.cli.main import app

README = Path(__file__).parent.parent / "README.md"
START, END = "<!-- reference: start -->", "<!-- reference: end -->"
COMMANDS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]


def options_of(command: Any) -> list[Any]:
    return [p for p in command.params if p.param_type_name == "option" and "--help" not in p.opts]


def reference() -> str:
    """The reference as Markdown: a section per command, a row per flag."""
    return "\n".join(section(name, command) for name, command in COMMANDS.items())


def section(name: str, command: Any) -> str:
    arguments = [p.metavar or p.name.upper() for p in command.params if p.param_type_name == "argument"]
    summary = " ".join(command.help.split("\n\n")[0].split())
    lines = [f"#### `{' '.join(['fnpipe', name, *arguments])}`", "", summary, "", "| flag | |", "| --- | --- |"]
    for option in options_of(command):
        text = (option.help or "").replace("|", "\\|")
        default = option.default
        shown = "" if default in (None, False, (), []) or callable(default) else f" Default: {default}."
        shown = "" if "efault" in text else shown
        lines.append(f"| `{max(option.opts, key=len)}{value_of(option)}` | {text}{shown} |")
    return "\n".join([*lines, ""])


def value_of(option: Any) -> str:
    """How the value of a flag is written: its metavar, ``N`` for a number, else the last word of the flag's name."""
    if option.is_flag:
        return ""
    kind = getattr(option, "type_descriptor", None)
    kind_name = str(kind.annotation) if kind is not None else option.type.name
    number = "int" in kind_name or "float" in kind_name
    value = option.metavar or ("N" if number else option.name.strip("_").split("_")[-1].upper())
    return " " + value.replace("|", "\\|")


def shown_commands() -> list[str]:
    """Every ``fnpipe ...`` line of the README's shell blocks, without comments and continuation marks."""
    found = []
    for block in re.findall(r"```(?:sh|bash)\n(.*?)```", README.read_text(), re.DOTALL):
        lines = block.replace("\\\n", " ").splitlines()
        found += [line.split(" #")[0].strip() for line in lines if line.startswith("fnpipe ")]
    return found


@pytest.mark.parametrize("name", COMMANDS)
def test_the_reference_names_every_flag_of_a_command_and_no_other(name: str):
    text = README.read_text().partition(START)[2].partition(END)[0]
    match = re.search(rf"^#### `fnpipe {name}\b.*?(?=^#### |\Z)", text, re.DOTALL | re.MULTILINE)
    assert match, f"{name} is not in the reference; run python {Path(__file__).name}"
    named = set(re.findall(r"^\| `(--[a-z-]+)", match[0], re.MULTILINE))
    assert named == {max(option.opts, key=len) for option in options_of(COMMANDS[name])}


def test_the_readme_shows_the_whole_chain():
    shown = " ".join(shown_commands())
    for name in ("shard", "embed", "build-graph", "group", "mine-connections", "train", "evaluate", "inspect"):
        assert f"fnpipe {name} " in shown


@pytest.mark.parametrize("line", shown_commands())
def test_every_command_line_of_the_readme_can_be_parsed(line: str):
    _, name, *arguments = shlex.split(line)
    COMMANDS[name].make_context(name, arguments)


if __name__ == "__main__":
    before, _, rest = README.read_text().partition(START)
    README.write_text(f"{before}{START}\n\n{reference()}\n{END}{rest.partition(END)[2]}")
