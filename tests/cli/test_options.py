"""How the flags of a command are made of the fields of a configuration."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from fnpipe.cli.options import After, Given, flags_of
from fnpipe.mining.connections.config import MineConfig
from fnpipe.mining.graph.config import GraphConfig
from fnpipe.mining.plans.config import GroupConfig
from fnpipe.pipeline.embed.config import EmbedConfig
from fnpipe.pipeline.flags import flag, option_of
from fnpipe.pipeline.shard.config import ShardConfig


@dataclass(frozen=True, kw_only=True)
class Config:
    size: int = flag(3, "How many.", metavar="N")
    seed: int = flag(0, "Of what is drawn.", after="no_order")
    names: tuple[str, ...] = flag((), "Which ones; repeat for several.")
    order: bool = flag(True, "Leave the order to chance.")
    room: int = flag(10, "How much room.", parse=lambda text: 0 if text == "none" else int(text))
    own: str = flag("", "Named by the command itself.")
    inner: float = 1.0


@flags_of(Config)
def command(
    place: Annotated[str, typer.Argument()],
    given: Given,
    extra: Annotated[bool, typer.Option("--extra"), After("size")] = False,
    own: Annotated[str | None, typer.Option("--own")] = None,
) -> None:
    """Do it."""
    print(json.dumps({"place": place, "extra": extra, "own": own, **given}))


def run(*words: str) -> dict[str, Any]:
    app = typer.Typer()
    app.command()(command)
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def test_what_is_not_given_has_the_default_of_its_field():
    defaults = {"size": 3, "seed": 0, "names": [], "order": True, "room": 10}
    assert run("there") == {"place": "there", "extra": False, "own": None, **defaults}


def test_what_is_given_comes_as_the_type_of_its_field():
    given = run("--no-order", "--names", "a", "--names", "b", "--room", "none", "--extra", "--own", "x", "there")
    assert given["order"] is False
    assert given["names"] == ["a", "b"]
    assert given["room"] == 0
    assert (given["extra"], given["own"], given["place"]) == (True, "x", "there")


def test_flags_stand_in_the_order_of_the_fields_and_where_they_say():
    app = typer.Typer()
    app.command()(command)
    parameters = [parameter.name for parameter in typer.main.get_command(app).params]
    assert parameters[:8] == ["place", "size", "extra", "names", "no_order", "seed", "room", "own"]


@pytest.mark.parametrize("config", [ShardConfig, EmbedConfig, GraphConfig, GroupConfig, MineConfig])
def test_every_field_of_a_stage_s_configuration_is_a_flag_but_those_whose_default_depends(config: type):
    without = {field.name for field in fields(config) if option_of(field) is None}
    assert without == {EmbedConfig: {"name"}, MineConfig: {"tau_low", "tau_high"}}.get(config, set())
