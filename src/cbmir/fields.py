"""Convert untrusted JSON to annotated types, including nested dataclasses. Errors name the field."""

from __future__ import annotations

import math
import types
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from reprlib import repr as shortened
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints, is_typeddict

_T = TypeVar("_T")
_WORDS = {bool: "true or false", int: "a whole number", float: "a finite number", str: "text", type(None): "null"}


@dataclass(frozen=True)
class Within:
    """The range of a number, for use in `Annotated`. Both ends are allowed."""

    low: float
    high: float = math.inf


def from_json(kind: Callable[..., _T], value: Any, where: str = "") -> _T:
    """Convert a JSON value to a type.

    Args:
        kind: A dataclass, a TypedDict (which allows further keys), `tuple[X, ...]`, `dict[str, X]`, a Literal, an
            optional type, a simple type, or Any: any JSON without NaN and infinity. `Annotated` may add a `Within`, a
            TypedDict that an object must also match, or a function of the value and its name that checks the value.
        where: The name of the value in messages.

    Raises:
        ValueError: The message names the field, what was expected and what was found. Errors of a dataclass's own
            checks are not changed.
    """
    made: _T = _made(kind, value, where)
    return made


def _made(kind: Any, value: Any, where: str) -> Any:
    origin, inner = get_origin(kind), get_args(kind)
    if kind is Any:
        _check_json(value, where)
        return value
    if origin is Annotated:
        return _annotated(inner, value, where)
    if origin in (Union, types.UnionType):  # X | None
        return None if value is None else _made(next(one for one in inner if one is not type(None)), value, where)
    if origin is Literal:
        if not isinstance(value, str | int) or value not in inner:
            raise _unexpected(where, f"one of {', '.join(map(str, inner))}", value)
        return value
    if origin is tuple:
        if not isinstance(value, list):
            raise _unexpected(where, "a list", value)
        return tuple(_made(inner[0], one, f"{where}[{number}]") for number, one in enumerate(value))
    if origin is dict:
        items = _object(value, where).items()
        return {name: _made(inner[1], one, _inside(where, name)) for name, one in items}
    if is_typeddict(kind):
        hints = _hints(kind)
        items = _object(value, where).items()
        return {name: _made(hints.get(name, Any), one, _inside(where, name)) for name, one in items}
    if is_dataclass(kind):
        return _dataclass(kind, _object(value, where), where)
    return _simple(kind, value, where)


def _annotated(inner: tuple[Any, ...], value: Any, where: str) -> Any:
    made = _made(inner[0], value, where)
    for extra in inner[1:]:
        if is_typeddict(extra):
            _made(extra, value, where)
        elif not isinstance(extra, Within):
            extra(value, where)
        elif not extra.low <= made <= extra.high:
            most = "" if extra.high == math.inf else f" to {extra.high:g}"
            raise _unexpected(where, f"a number from {extra.low:g}{most}", value)
    return made


def _dataclass(kind: Any, value: dict[str, Any], where: str) -> Any:
    own = fields(kind)
    needed = {one.name for one in own if one.default is MISSING and one.default_factory is MISSING}
    if missing := sorted(needed - value.keys()):
        raise ValueError(f"{_inside(where, missing[0])}: expected a value, found none")
    if unknown := sorted(value.keys() - {one.name for one in own}):
        raise ValueError(f"{_inside(where, unknown[0])}: expected no such field, found one")
    hints = _hints(kind)
    return kind(**{name: _made(hints[name], one, _inside(where, name)) for name, one in value.items()})


def _simple(kind: Any, value: Any, where: str) -> Any:
    allowed = (int, float) if kind is float else kind
    if not isinstance(value, allowed) or (isinstance(value, bool) and kind is not bool):
        raise _unexpected(where, _WORDS[kind], value)
    if kind is float:
        try:
            value = float(value)
        except OverflowError:
            value = math.inf
        if not math.isfinite(value):
            raise _unexpected(where, _WORDS[float], value)
    return value


def _check_json(value: Any, where: str) -> None:
    if isinstance(value, dict):
        for name, one in value.items():
            _check_json(one, _inside(where, name))
    elif isinstance(value, list):
        for number, one in enumerate(value):
            _check_json(one, f"{where}[{number}]")
    elif isinstance(value, float) and not math.isfinite(value):
        raise _unexpected(where, _WORDS[float], value)


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _unexpected(where, "an object", value)
    return value


def _inside(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name


def _unexpected(where: str, what: str, value: Any) -> ValueError:
    return ValueError(f"{where}: expected {what}, found {shortened(value)}" if where else
                      f"expected {what}, found {shortened(value)}")  # fmt: skip
