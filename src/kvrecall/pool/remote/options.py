"""The options of one store: taken out of a mapping by name and type; the rest are errors."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from kvrecall.errors import ConfigError

_REQUIRED = object()


class Options:
    """Take what is known, then ``end``. All raise ConfigError, without showing other values."""

    def __init__(self, raw: Mapping[str, object], source: str) -> None:
        self._left = dict(raw)
        self._known: list[str] = []
        self._source = source

    def has(self, name: str) -> bool:
        self._known.append(name)
        return name in self._left

    def text(self, name: str) -> str:
        value = self._take(name, _REQUIRED)
        if not isinstance(value, str) or not value:
            raise self._wrong(name, value, "it must be a text")
        return value

    def flag(self, name: str, default: bool) -> bool:
        value = self._take(name, default)
        if not isinstance(value, bool):
            raise self._wrong(name, value, "allowed: true, false")
        return value

    def number(self, name: str, default: float, least: float, most: float) -> float:
        value = self._take(name, default)
        good = isinstance(value, int | float) and not isinstance(value, bool)
        if not good or not least <= value <= most:  # type: ignore[operator]
            raise self._wrong(name, value, f"it must be a number from {least:g} to {most:g}")
        return float(value)  # type: ignore[arg-type]

    def whole(self, name: str, default: int, least: int, most: int) -> int:
        value = self.number(name, default, least, most)
        if value != int(value):
            raise self._wrong(name, value, "it must be a whole number")
        return int(value)

    def mapping(self, name: str) -> dict[str, str]:
        """Texts by name. Their values may be secrets: errors show names only."""
        value = self._take(name, {})
        if not isinstance(value, Mapping):
            raise ConfigError(f"{self._source}: {name} must be an object of names and texts")
        for key, text in value.items():
            if not isinstance(key, str) or not isinstance(text, str):
                raise ConfigError(f"{self._source}: {name}.{key} must be a text")
        return dict(value)

    def end(self) -> None:
        """Raises if something is left that was not asked for."""
        for name in self._left:
            close = difflib.get_close_matches(name, self._known, 1)
            hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(self._known)}"
            raise ConfigError(f"{self._source}: unknown option {name!r}; {hint}")

    def _take(self, name: str, default: object) -> object:
        self._known.append(name)
        if default is _REQUIRED and name not in self._left:
            raise ConfigError(f"{self._source}: {name} is missing")
        return self._left.pop(name, default)

    def _wrong(self, name: str, value: object, allowed: str) -> ConfigError:
        return ConfigError(f"{self._source}: {name} is {value!r}; {allowed}")
