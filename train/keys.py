"""The keys of a configuration, the fields of its dataclass, read from what the user gives and checked.

A field's annotation is the key's type; ``Literal`` lists what a text may be, and ``| None`` says that the value may be
left open. A user gives a YAML file, flags and ``key=value`` texts.
"""

from __future__ import annotations

import dataclasses
import math
import re
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union

from fnpipe.pipeline.errors import InputError, nearest
from fnpipe.pipeline.flags import option_of
from fnpipe.pipeline.machine.limits import most


class SessionKeys:
    """The keys that a run of every method has; a configuration has each at its own place, with its own default."""

    method: str
    seed: int
    threads: int | None
    device: str
    ema_decay: float
    evaluate_every: int
    evaluate_on: str | None
    evaluate_images: int
    checkpoint_steps: int
    keep_every: int
    tensorboard: bool

    @property
    def evaluated_on(self) -> str | None:
        """The split that is evaluated while the run goes; None: none is."""
        return self.evaluate_on


# Known before torch is loaded: an architecture, and the methods that train a network on frozen embeddings.
TINY = "fnpipe-tiny"
VACSR, ADAPTER = "vacsr", "adapter"
FROZEN = (VACSR, ADAPTER)
# Hidden units of their networks, in widths of the embeddings. A VACSR of one width tells foreign combinations apart
# less well by .02 to .04 in AUROC and by 3 to 4 points of mAP@R.
HIDDEN = 2
# Rows and columns of a block of combinations that VACSR computes at a time.
TILE = 128

_KIND_NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}


def given_values(
    flags: Mapping[str, Any], assignments: Sequence[str] = (), file: str | Path | None = None
) -> dict[str, Any]:
    """A YAML file, over it the flags that were given and ``key=value`` texts; neither keys nor types are checked.

    Raises:
        InputError: the file cannot be read, a text has no ``=``, or a key was given twice.
    """
    values = _read_yaml(Path(file)) if file is not None else {}
    given = {key: value for key, value in flags.items() if value is not None}
    for text in assignments:
        key, equals, value = text.partition("=")
        key = key.strip().replace("-", "_")
        if not equals:
            raise InputError(f"--set {text}: write --set key=value")
        if key in given:
            raise InputError(f"--set {text}: {key} was given already")
        given[key] = _yaml_value(value, f"--set {text}")
    return values | given


def typed(key: str, value: Any, of: type, listed_by: str = "fnpipe train --keys") -> Any:
    """``value`` as the type that ``key`` has in the dataclass ``of``; ints pass as floats, texts of numbers as numbers.

    Raises:
        InputError: there is no such key, or the value is of another kind.
    """
    kinds = _kinds(of)
    if key not in kinds:
        raise InputError(f"unknown key {key!r}{nearest(key, sorted(kinds))}; `{listed_by}` lists them")
    kind, choices = kinds[key].type, kinds[key].choices
    if value is None and kinds[key].optional:
        return None
    if kind is not str and isinstance(value, str) and value in choices:
        return value
    if kind is bool and isinstance(value, bool):
        return value
    if kind is str and isinstance(value, str | int | float) and not isinstance(value, bool):
        return str(value)
    if kind in (int, float) and isinstance(value, str | int | float) and not isinstance(value, bool):
        # YAML 1.1 reads 1e-4 as text: it wants a dot.
        number = _number(value)
        if number is not None and (kind is float or number.is_integer()):
            return kind(value) if kind is int and isinstance(value, int) else kind(number)
    listed = f", as {key}={','.join(map(str, value))}" if kind is str and isinstance(value, list) and value else ""
    words = "" if kind is str else "".join(f" or {word}" for word in choices)
    raise InputError(f"{key} is {value!r}; it takes {_KIND_NAMES[kind]}{words}{listed}")


def check(config: Any) -> None:
    """Compare a config's values with the choices and bounds of its fields; None passes where a field may be None.

    Raises:
        InputError: a text is none of its choices, or a number lies outside of its bounds.
    """
    kinds, fields = _kinds(config.__class__), dataclasses.fields(config)
    for key, value in ((field.name, getattr(config, field.name)) for field in fields):
        known = kinds[key].choices
        number = kinds[key].type is not str and isinstance(value, int | float)
        if known and value not in known and not number and not (value is None and kinds[key].optional):
            raise InputError(f"{key} is {value!r}; choose from {', '.join(known)}{nearest(str(value), [*known])}")
    for field in fields:
        value, said = getattr(config, field.name), option_of(field)
        if said is not None and said.low is not None and isinstance(value, int | float):
            _check_bounds(field.name, value, said.low, said.high)


def _check_bounds(key: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        range_ = f"be at least {low}" if high == math.inf else f"lie between {low} and {high}"
        raise InputError(f"{key} is {value}; it must {range_}")
    if isinstance(value, int) and value > most(key):
        raise InputError(f"{key} is {value}; it must be at most {most(key):,}")


def describe(of: type) -> list[tuple[str, str, str]]:
    """Every key of the dataclass ``of`` with its type or choices and its default, in its order."""
    kinds, texts = _kinds(of), meanings(of)
    rows = []
    for field in dataclasses.fields(of):
        default = "" if field.default is dataclasses.MISSING else field.default
        if default is None:
            default = _when_none(texts[field.name])
        kind = kinds[field.name]
        words = kind.choices if kind.choices and kind.type is str else (kind.type.__name__, *kind.choices)
        rows.append((field.name, "|".join(words), str(default)))
    return rows


def _when_none(meaning: str) -> str:
    """What the text of a key says None stands for, or none."""
    said = re.search(r"\bNone: (.+?)(?:[;)]|\.(?:\s|$)|$)", meaning)
    return said[1] if said else "none"


def meanings(of: type) -> dict[str, str]:
    """What every key of the dataclass ``of`` means, in a sentence or more."""
    said = {field.name: option_of(field) for field in dataclasses.fields(of)}
    return {name: option.meaning if option else "" for name, option in said.items()}


@dataclass(frozen=True)
class _Kind:
    """What a key takes: a type, of texts only the ``choices`` where there are some, and perhaps None."""

    type: type
    choices: tuple[str, ...]
    optional: bool


@cache
def _kinds(of: type) -> dict[str, _Kind]:
    """By the annotations of its fields, what every key of the dataclass ``of`` takes."""
    hints = typing.get_type_hints(of)
    return {field.name: _kind(hints[field.name]) for field in dataclasses.fields(of)}


def _kind(hint: Any) -> _Kind:
    optional = typing.get_origin(hint) in (Union, UnionType)
    kinds = [kind for kind in typing.get_args(hint) if kind is not NoneType] if optional else [hint]
    words = [word for kind in kinds if typing.get_origin(kind) is Literal for word in typing.get_args(kind)]
    types = [kind for kind in kinds if typing.get_origin(kind) is not Literal]
    return _Kind(types[0] if types else str, tuple(words), optional)


def _number(value: str | int | float) -> float | None:
    try:
        number = float(value)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _yaml_value(text: str, where: str) -> Any:
    import yaml

    try:
        return yaml.safe_load(text) if text.strip() else text
    except (yaml.YAMLError, ValueError, RecursionError):
        raise InputError(f"{where}: cannot be read as a YAML value; quote it") from None


def _read_yaml(path: Path) -> dict[str, Any]:
    import yaml

    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}; give --config a YAML file") from None
    except UnicodeDecodeError:
        raise InputError(f"{path}: not UTF-8 text; give --config a YAML file") from None
    # A date of the 99th day, or a number of more digits than Python takes, is a ValueError.
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        raise InputError(f"{path}: not YAML{f' (line {mark.line + 1})' if mark else ''}") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise InputError(f"{path}: holds no `key: value` lines")
    return {str(key).replace("-", "_"): value for key, value in values.items()}
