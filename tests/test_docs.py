"""The README and docs/: the reference is complete, the site builds, and every command line can be parsed."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from test_project import FLOORS, PACKAGES

from fnpipe.train.methods import ALL_METHODS, describe_keys

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tools"))
from reference import COMMANDS, options_of, public_members  # noqa: E402

REFERENCE = ROOT / "docs" / "reference"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
AGAIN = "run `make docs`, or python tools/reference.py"
# Words of the text that stand for what a reader puts in: a name, a file, the flags of the command that is spoken of.
IN_PROSE = re.compile(r"`(fnpipe [^`]+)`")


def shown_commands(page: Path) -> list[str]:
    """Every ``fnpipe ...`` line of a page's shell blocks, without comments and continuation marks."""
    found = []
    for block in re.findall(r"```(?:sh|bash)\n(.*?)```", page.read_text(), re.DOTALL):
        lines = block.replace("\\\n", " ").splitlines()
        found += [line.split(" #")[0].strip() for line in lines if line.startswith("fnpipe ")]
    return found


def in_prose() -> set[tuple[str, str]]:
    """Every ``fnpipe ...`` between backticks, with the page that it stands on."""
    return {(str(page.relative_to(ROOT)), text) for page in PAGES for text in IN_PROSE.findall(page.read_text())}


@pytest.mark.parametrize("name", COMMANDS)
def test_the_reference_names_every_flag_of_a_command_and_no_other(name: str):
    text = (REFERENCE / "commands.md").read_text()
    match = re.search(rf"^## `fnpipe {name}[ `].*?(?=^## |\Z)", text, re.DOTALL | re.MULTILINE)
    assert match, f"{name} is not in the reference; {AGAIN}"
    named = set(re.findall(r"^\| (?:`|<code>)(--[a-z-]+)", match[0], re.MULTILINE))
    assert named == {max(option.opts, key=len) for option in options_of(COMMANDS[name])}, AGAIN


@pytest.mark.parametrize("method", ALL_METHODS)
def test_the_reference_names_every_training_key_of_a_method_and_no_other(method: str):
    text = (REFERENCE / "training-keys.md").read_text()
    match = re.search(rf"^## [^\n]*\b{method}\b.*?(?=^## |\Z)", text, re.DOTALL | re.MULTILINE)
    assert match, AGAIN
    assert re.findall(r"^\| `([a-z_0-9]+)`", match[0], re.MULTILINE) == [key for key, _, _ in describe_keys(method)]


def test_the_reference_names_every_public_member_and_no_other():
    assert re.findall(r"^## `([\w.]+)`", (REFERENCE / "python.md").read_text(), re.MULTILINE) == [*public_members()]


def test_the_readme_shows_the_whole_chain():
    shown = " ".join(shown_commands(ROOT / "README.md"))
    for name in ("shard", "embed", "build-graph", "group", "mine-connections", "train", "evaluate", "inspect"):
        assert f"fnpipe {name} " in shown


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 200


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_line_of_a_page_can_be_parsed(page: Path):
    for line in shown_commands(page):
        _, name, *arguments = shlex.split(line)
        COMMANDS[name].make_context(name, arguments)


@pytest.mark.parametrize(("page", "text"), sorted(in_prose()))
def test_commands_named_in_the_text_are_there_with_their_flags(page: str, text: str):
    _, name, *words = text.split()
    assert name in COMMANDS, page
    flags = {flag for option in options_of(COMMANDS[name]) for flag in option.opts} | {"--help"}
    assert {word.partition("=")[0] for word in words if word.startswith("--")} <= flags, page


def module_file(name: str) -> Path:
    """Where a dotted name of ours stands: a folder, or a module."""
    path = ROOT.joinpath(*name.split(".")[1:])
    return path if path.is_dir() else path.with_suffix(".py")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_modules_definitions_and_paths_that_a_page_names_are_there(page: Path):
    text = page.read_text()
    for name in re.findall(r"`(fnpipe\.(?:pipeline|mining|train|cli)[\w.]*)", text):
        there = module_file(name).exists() or module_file(name.rpartition(".")[0]).is_file()
        assert there or name in public_members(), name
    for what, name in re.findall(r"`(\w+)`\s+(?:in|of)\s+`(fnpipe\.[\w.]+)`", text):
        assert re.search(rf"^(?:def |class |){what}\b", module_file(name).read_text(), re.MULTILINE), (
            f"{what} in {name}"
        )
    for path in re.findall(r"`((?:pipeline|mining|train|cli|tests|tools|benchmarks|experiments)/[\w./-]+)`", text):
        assert (ROOT / path).exists(), path


def test_the_architecture_shows_the_floors_that_are_held():
    text = (ROOT / "docs" / "develop" / "index.md").read_text()
    for package in PACKAGES:
        (row,) = re.findall(rf"^\| `{package}` \| (`.*) \|$", text, re.MULTILINE)
        shown = [{f"{package}.{room}" for room in re.findall(r"`(\w+)`", floor)} for floor in row.split(" > ")]
        assert shown == [{*rooms} for rooms in FLOORS if rooms[0].startswith(f"{package}.") and "__" not in rooms[0]]


def test_the_site_builds_with_every_page_in_the_menu_and_no_broken_link(tmp_path: Path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr + done.stdout
    # Nothing is fetched when a page is opened.
    page = (tmp_path / "site" / "index.html").read_text()
    assert not re.findall(r'(?:src|href)="https?://[^"]*\.(?:js|css|woff2?)', page)


def test_the_readme_links_to_what_is_there():
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", (ROOT / "README.md").read_text()):
        assert "://" in target or (ROOT / target).exists(), target
