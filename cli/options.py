"""What every command asks of the values it is given, whatever they mean; nothing here is slow to import."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fnpipe.pipeline.errors import InputError
from fnpipe.pipeline.machine.device import check_device, check_precision
from fnpipe.pipeline.machine.limits import most

ENGINES = ("local", "ray")


def check_given(parameters: Sequence[Any], values: Mapping[str, Any]) -> None:
    """Refuse what no flag and no argument takes.

    Args:
        parameters: a command's, as click has them. values: what they were given or have by default, by their names.

    Raises:
        InputError: an empty text, a number that is none, infinite or beyond `most`, or no device, precision or engine.
    """
    for parameter in parameters:
        given = values.get(parameter.name)
        is_option = parameter.param_type_name == "option"
        shown = max(parameter.opts, key=len) if is_option else parameter.metavar or parameter.name.upper()
        for value in given if isinstance(given, list | tuple) else (given,):
            _check(shown, parameter.name, value, value == parameter.default)
    if ":" in str(values.get("device")):
        check_device(values["device"], values.get("engine", "local"))


def _check(shown: str, name: str, value: Any, default: bool) -> None:
    if isinstance(value, str) and not default:
        if not value.strip():
            raise InputError(f"{shown} is empty; give it a value, or leave it out")
        if "\0" in value:
            raise InputError(f"{shown}: no text of the command line can hold a NUL")
        if name in _KINDS:
            _KINDS[name](value)
    elif isinstance(value, int) and not -most(name) <= value <= most(name):
        raise InputError(f"{shown} {value}: at most {most(name):,}")
    elif name == "seed" and value < 0:
        raise InputError(f"{shown} {value}: a number from 0")
    elif isinstance(value, float) and not math.isfinite(value):
        raise InputError(f"{shown} {value}: give a finite number")


def _check_engine(engine: str) -> None:
    if engine not in ENGINES:
        raise InputError(f"--engine {engine}: give local or ray")


_KINDS: Mapping[str, Callable[[str], object]] = {
    "device": check_device,
    "precision": check_precision,
    "engine": _check_engine,
}
