"""Write the pages of ``docs/reference`` that come from the code: commands and flags, training keys, the Python API.

    python tools/reference.py

Each page keeps what stands above its mark; all below is made from the commands' own help, from `fnpipe train --keys`,
and from the docstrings of public members.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer

from fnpipe.cli.main import app
from fnpipe.train.learners.presets import PAPERS
from fnpipe.train.methods import ALL_METHODS, describe_keys, key_meanings

PAGES = Path(__file__).parent.parent / "docs" / "reference"
MARK = "<!-- generated: make docs -->"
COMMANDS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
# Where public members are exported.
PACKAGES = ("fnpipe", "fnpipe.pipeline", "fnpipe.mining", "fnpipe.train")


def options_of(command: Any) -> list[Any]:
    """The flags of a command, without ``--help``."""
    return [p for p in command.params if p.param_type_name == "option" and "--help" not in p.opts]


def commands_page() -> str:
    """A section per command, a row per flag."""
    return "\n".join(_command(name, command) for name, command in COMMANDS.items())


def keys_page() -> str:
    """A section per set of keys: that of the methods that read pictures, and of each on frozen embeddings."""
    methods_of: dict[tuple[Any, ...], list[str]] = {}
    for method in ALL_METHODS:
        methods_of.setdefault(tuple(describe_keys(method)), []).append(method)
    sections = []
    for rows, methods in methods_of.items():
        meaning = key_meanings(methods[0])
        lines = [f"## {', '.join(methods)}", "", "| key | |", "| --- | --- |"]
        for key, kind, default in rows:
            takes = f"{kind.replace('|', ', ')}; default: {default}." if default else f"{kind.replace('|', ', ')}."
            lines.append(f"| `{key}` | {_cell(_unsaid(meaning[key], default))} *{_cell(takes)}* |")
        sections.append("\n".join([*lines, ""]))
    return "\n".join([*sections, *_presets()])


def _presets() -> list[str]:
    """What each method's paper sets, and where it says so."""
    lines = [
        "## Presets",
        "",
        "What `--preset paper` sets where nothing else is given; all other keys keep their defaults, as",
    ]
    lines += [
        "with `--preset ours`, which is the same as none.",
        "",
        "| method | keys | source |",
        "| --- | --- | --- |",
    ]
    for method, paper in PAPERS.items():
        keys = ", ".join(f"`{key}={value}`" for key, value in paper.values.items())
        lines.append(f"| {method} | {keys} | {_cell(paper.source)} |")
    return [*lines, ""]


def _unsaid(meaning: str, default: str) -> str:
    """The meaning without what the column of defaults says already."""
    for said in (f" (None: {default})", f"; None: {default}", f" None: {default}.", f"None: {default}."):
        meaning = meaning.replace(said, "")
    return meaning


def python_page() -> str:
    """A section per exported member: its signature, its docstring, and those of its public methods."""
    lines = []
    for name, member in public_members().items():
        lines += [f"## `{name}`", "", *_member(member)]
        for method, function in inspect.getmembers(member, inspect.isfunction) if inspect.isclass(member) else ():
            if not method.startswith("_") and function.__qualname__.startswith(member.__name__) and function.__doc__:
                lines += [f"### `{member.__name__}.{method}`", "", *_member(function)]
    return "\n".join(lines)


def public_members() -> dict[str, Any]:
    """What ``__all__`` of each package exports, by dotted name; values that are no function or class are left out."""
    found = {}
    for package in PACKAGES:
        module = importlib.import_module(package)
        for name in getattr(module, "__all__", ()):
            member = getattr(module, name)
            if inspect.isclass(member) or inspect.isfunction(member):
                found[f"{package}.{name}"] = member
    return found


def _member(member: Any) -> list[str]:
    try:
        signature = f"{member.__name__}{inspect.signature(member)}"
    except ValueError:
        signature = member.__name__
    # An annotation is a text until it is asked for.
    signature = re.sub(r"(: |-> )'([^']*)'", r"\1\2", signature)
    return ["```python", signature, "```", "", _docstring(inspect.getdoc(member) or ""), ""]


def _docstring(text: str) -> str:
    """A docstring as Markdown: its sections (Args, Returns, ...) become lists."""
    lines: list[str] = []
    inside = False
    for line in text.splitlines():
        if section := re.fullmatch(r"(Args|Returns|Raises|Attributes|Yields):", line):
            inside = True
            lines += ["", f"**{section[1]}**", ""]
        elif inside and re.match(r" {4}\S", line):
            lines.append("- " + re.sub(r"^([\w, *]+):", r"`\1`:", line.strip()))
        elif inside and line.startswith(" "):
            lines.append("  " + line.strip())
        else:
            inside = inside and not line
            lines.append(line)
    return "\n".join(lines).replace("``", "`")


def _command(name: str, command: Any) -> str:
    arguments = [p.metavar or p.name.upper() for p in command.params if p.param_type_name == "argument"]
    summary = " ".join(command.help.split("\n\n")[0].split())
    lines = [f"## `{' '.join(['fnpipe', name, *arguments])}`", "", summary, "", "| flag | |", "| --- | --- |"]
    for option in options_of(command):
        text = _cell(option.help or "")
        default = option.default
        shown = "" if default in (None, False, (), []) or callable(default) else f" Default: {default}."
        shown = "" if "efault" in text else shown
        # Between backticks GitHub wants a bar escaped, and shows none; Python-Markdown shows the backslash.
        flag = f"{max(option.opts, key=len)}{_value(option)}".replace("|", "&#124;")
        lines.append(f"| <code>{flag}</code> | {text}{shown} |" if "&" in flag else f"| `{flag}` | {text}{shown} |")
    return "\n".join([*lines, ""])


def _value(option: Any) -> str:
    """How the value of a flag is written: its metavar, ``N`` for a number, else the last word of the flag's name."""
    if option.is_flag:
        return ""
    kind = getattr(option, "type_descriptor", None)
    kind_name = str(kind.annotation) if kind is not None else option.type.name
    number = "int" in kind_name or "float" in kind_name
    value = option.metavar or ("N" if number else option.name.strip("_").split("_")[-1].upper())
    return f" {value}"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


GENERATED: dict[str, Callable[[], str]] = {
    "commands.md": commands_page,
    "training-keys.md": keys_page,
    "python.md": python_page,
}


def write_pages() -> None:
    """Make what stands below the mark of each page anew."""
    for name, generate in GENERATED.items():
        above = (PAGES / name).read_text().partition(MARK)[0]
        (PAGES / name).write_text(f"{above}{MARK}\n\n{generate().rstrip()}\n")


if __name__ == "__main__":
    write_pages()
