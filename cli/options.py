"""The flags of a stage's configuration, and what every command asks of its values; nothing here is slow to import."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from types import GenericAlias
from typing import Annotated, Any, Literal, TypeAlias, get_args, get_origin, get_type_hints

import typer

from fnpipe.pipeline.errors import InputError
from fnpipe.pipeline.flags import Option, option_of
from fnpipe.pipeline.machine.device import check_device, check_engine, check_precision
from fnpipe.pipeline.machine.limits import most


def check_once(given: Sequence[Any]) -> None:
    """Refuse a flag that takes one value and was given several, of which the last would win without a word.

    Args:
        given: a command's parameters, each as often as it was given.

    Raises:
        InputError: there is one.
    """
    for parameter in given:
        takes_one = parameter.param_type_name == "option" and not parameter.is_flag and not parameter.multiple
        if takes_one and given.count(parameter) > 1:
            raise InputError(
                f"{max(parameter.opts, key=len)}: given {given.count(parameter)} times; it takes one value"
            )


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


_KINDS: Mapping[str, Callable[[str], object]] = {
    "device": check_device,
    "precision": check_precision,
    "engine": check_engine,
}

# What a command was given for the fields of its configuration, by their names.
Given: TypeAlias = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class After:
    """In the annotation of a flag that only the command knows: the flag that it follows in the help."""

    name: str


def flags_of(config: type, *, left_open: bool = False) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command a flag for every field of ``config`` that is one, but for those that it names itself.

    The command takes what was given for them, by the names of the fields, as its argument ``given``, in whose place
    they stand. A field that is true by default is turned off by ``--no-NAME``.

    Args:
        left_open: what was not given is None, whatever its default, because something else may say it.
    """

    def with_flags(command: Callable[..., None]) -> Callable[..., None]:
        hints = get_type_hints(command, include_extras=True)
        own = inspect.signature(command).parameters
        flags = [flag for flag in _flags(config, left_open) if flag.field not in own]
        placed: list[inspect.Parameter] = []
        for name, parameter in own.items():
            if name == "given":
                for flag in sorted(flags, key=lambda flag: flag.after is not None):
                    _place(placed, flag.parameter, flag.after)
            else:
                own_place = next((extra.name for extra in _extras(hints[name]) if isinstance(extra, After)), None)
                taken = parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY)
                _place(placed, taken, own_place)

        @functools.wraps(command)
        def call(**values: Any) -> None:
            given = {flag.field: flag.value(values.pop(flag.parameter.name)) for flag in flags}
            command(**values, given=given)

        call.__signature__ = inspect.Signature(placed)  # type: ignore[attr-defined]
        call.__annotations__ = {parameter.name: parameter.annotation for parameter in placed}
        return call

    return with_flags


@dataclasses.dataclass(frozen=True)
class _FieldFlag:
    """The flag of a field: the parameter that typer reads, and how the field's value is made of what it gives."""

    field: str
    parameter: inspect.Parameter
    value: Callable[[Any], Any]
    after: str | None


def _flags(config: type, left_open: bool) -> list[_FieldFlag]:
    hints = get_type_hints(config)
    found = [(field, option_of(field)) for field in dataclasses.fields(config)]
    return [
        _field_flag(field.name, None if left_open else field.default, hints[field.name], option)
        for field, option in found
        if option is not None and option.help is not None
    ]


def _field_flag(field: str, default: Any, kind: Any, option: Option) -> _FieldFlag:
    name, value = field, option.parse
    if default is True:
        name, default, value = f"no_{name}", False, operator.not_
    elif get_origin(kind) is tuple:
        element = str if option.parse else get_args(kind)[0]
        parse = option.parse or element
        kind, default, value = GenericAlias(list, element) | None, None, lambda words: tuple(map(parse, words or ()))
    elif option.parse is not None:
        kind, default = (str | None, None) if default is None else (str, str(default))
    elif get_origin(kind) is Literal:
        kind = str | None
    shown = typer.Option(
        f"--{name.replace('_', '-')}",
        help=option.help,
        metavar=option.metavar,
        show_default=True if option.shown is None else option.shown,
    )
    if default is dataclasses.MISSING:
        default = inspect.Parameter.empty
    parameter = inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, shown]
    )
    return _FieldFlag(field, parameter, value or (lambda given: given), option.after)


def _extras(annotation: Any) -> tuple[Any, ...]:
    return getattr(annotation, "__metadata__", ())


def _place(placed: list[inspect.Parameter], parameter: inspect.Parameter, after: str | None) -> None:
    names = [other.name for other in placed]
    placed.insert(len(placed) if after is None else names.index(after) + 1, parameter)
