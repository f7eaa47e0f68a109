"""What the user said of a configuration: a YAML file, flags and ``key=value`` texts, typed by its dataclass."""

from __future__ import annotations

import dataclasses
import math
import re
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Any

from fnpipe.pipeline.errors import InputError, nearest
from fnpipe.pipeline.machine.limits import most

# What a key of training takes, where it takes one of a few words.
CHOICES: Mapping[str, tuple[str, ...]] = {
    "method": ("itc", "albef", "grit", "mafa", "falcon"),
    "false_negatives": ("positive", "drop", "ignore"),
    "unscored": ("negative", "next"),
    "second": ("plain", "next-negative"),
    "itc_loss": ("softmax", "sigmoid"),
    "text_attention": ("own", "bidirectional"),
    "precision": ("auto", "fp32", "bf16", "fp16"),
    "augment": ("auto", "tiny", "albef", "open-clip", "none"),
    "scheduler": ("learned", "fixed", "hardening", "softening"),
    "quantile_scale": ("rank", "log-rank"),
    "policy_level": ("anchor", "batch"),
    "policy_input": ("softmax", "standardised"),
    "baseline": ("moving", "none"),
    "reward": ("mlm", "itg"),
}

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
    hints = _kinds(of)
    if key not in hints:
        raise InputError(f"unknown key {key!r}{nearest(key, sorted(hints))}; `{listed_by}` lists them")
    kind, optional = hints[key]
    if value is None and optional:
        return None
    if kind is bool and isinstance(value, bool):
        return value
    if kind is str and isinstance(value, str | int | float) and not isinstance(value, bool):
        return str(value)
    if kind in (int, float) and isinstance(value, str | int | float) and not isinstance(value, bool):
        # YAML 1.1 reads 1e-4 as text: it wants a dot.
        number = _number(value)
        if number is not None and (kind is float or number.is_integer()):
            return kind(value) if kind is int and isinstance(value, int) else kind(number)
    raise InputError(f"{key} is {value!r}; it takes {_KIND_NAMES[kind]}")


def check_choices(config: Any, choices: Mapping[str, tuple[str, ...]], open_keys: Sequence[str] = ()) -> None:
    """Hold a config's texts against what may be chosen; ``open_keys`` may be None as well.

    Raises:
        InputError: one is none of its choices.
    """
    for key, known in choices.items():
        value = getattr(config, key)
        if value not in known and not (value is None and key in open_keys):
            raise InputError(f"{key} is {value!r}; choose from {', '.join(known)}{nearest(str(value), [*known])}")


def check_bounds(config: Any, bounds: Sequence[tuple[str, float, float]]) -> None:
    """Compare a config's numbers with (key, lowest, highest), whole ones with `most` too; None is none of them.

    Raises:
        InputError: one lies outside.
    """
    for key, low, high in bounds:
        value = getattr(config, key)
        if value is not None and not low <= value <= high:
            range_ = f"be at least {low}" if high == math.inf else f"lie between {low} and {high}"
            raise InputError(f"{key} is {value}; it must {range_}")
        if isinstance(value, int) and value > most(key):
            raise InputError(f"{key} is {value}; it must be at most {most(key):,}")


def describe(of: type, choices: Mapping[str, tuple[str, ...]]) -> list[tuple[str, str, str]]:
    """Every key of the dataclass ``of`` with its type and default, in its order."""
    kinds, texts = _kinds(of), meanings(of)
    rows = []
    for field in dataclasses.fields(of):
        kind_name = "|".join(choices[field.name]) if field.name in choices else kinds[field.name][0].__name__
        default = "" if field.default is dataclasses.MISSING else field.default
        if default is None:
            default = _when_none(texts.get(field.name, ""))
        rows.append((field.name, kind_name, str(default)))
    return rows


def _when_none(meaning: str) -> str:
    """What the text of a key says None stands for, or none."""
    said = re.search(r"\bNone: (.+?)(?:[;)]|\.(?:\s|$)|$)", meaning)
    return said[1] if said else "none"


def meanings(of: type) -> dict[str, str]:
    """The text of every key in the docstrings of ``of`` and its bases; keys that share a line share its text."""
    found: dict[str, str] = {}
    for part in (kind for kind in reversed(of.__mro__) if dataclasses.is_dataclass(kind)):
        keys: list[str] = []
        for line in (part.__doc__ or "").partition("Attributes:\n")[2].splitlines():
            entry = re.match(r" {8}([a-z_0-9]+(?:, [a-z_0-9]+)*): (.*)", line)
            if entry:
                keys = entry[1].split(", ")
                found |= dict.fromkeys(keys, entry[2])
            else:
                found |= {key: f"{found[key]} {line.strip()}" for key in keys}
    return {key: text.replace("`", "").strip() for key, text in found.items()}


def _kinds(of: type) -> dict[str, tuple[type, bool]]:
    """The type of every key, and whether it may be None."""
    found = {}
    names = {field.name for field in dataclasses.fields(of)}
    for key, hint in typing.get_type_hints(of).items():
        if key in names:
            kinds = typing.get_args(hint) or (hint,)
            found[key] = next(kind for kind in kinds if kind is not type(None)), isinstance(hint, UnionType)
    return found


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


# What a resumed run may change: where and how fast it runs, not what it computes.
FREE_ON_RESUME = frozenset({"device", "threads", "workers", "cache_mib", "materialized", "tensorboard"})
