"""Looking a dotted path up in a raw row, whatever its spelling and nesting.

The rows of a file mostly have the same keys, and of a hundred names that tools use for our fields a row has
five. What keys say is therefore worked out once for each set of them, not for each row.
"""

import re
from functools import lru_cache
from typing import Any, NamedTuple

from jobs.formats.json_text import embedded

Path = tuple[str, ...]
"""A dotted path, split: ("inputs", "question")."""


class Found(NamedTuple):
    """A value that is not null, and the path it was found under, in the row's own spelling."""

    value: Any
    path: str


def paths(*dotted: str) -> tuple[Path, ...]:
    """Dotted paths, split."""
    return tuple(tuple(path.split(".")) for path in dotted)


_CACHED = 4096
_CACHED_CHARS = 256
_CACHED_SHAPES = 1024
_CACHED_SHAPE_CHARS = 4096
"""A key comes from a log and may be as long as a row: what outlives its row is bounded, some MiB of keys."""


def snake(name: str) -> str:
    """One spelling: retrievalContext, Retrieval Context and RETRIEVAL_CONTEXT are retrieval_context."""
    return _cached_snake(name) if len(name) <= _CACHED_CHARS else _snake(name)


def _snake(name: str) -> str:
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name.strip())
    return re.sub(r"[\s-]+", "_", words).lower()


_cached_snake = lru_cache(_CACHED)(_snake)


class _Shape:
    """What the keys of an object say, whatever their values."""

    __slots__ = ("_within", "roots", "spellings")

    def __init__(self, keys: tuple[str, ...]) -> None:
        # Reversed, so that the first of two keys with one meaning wins.
        self.spellings = {snake(key): key for key in reversed(keys)}
        self.roots = {name.split(".", 1)[0] for pair in self.spellings.items() for name in pair}
        self._within: dict[tuple[Path, ...], tuple[Path, ...]] = {}

    def within(self, candidates: tuple[Path, ...]) -> tuple[Path, ...]:
        if candidates not in self._within:
            self._within[candidates] = tuple(path for path in candidates if path[0] in self.roots)
        return self._within[candidates]


_cached_shape = lru_cache(_CACHED_SHAPES)(_Shape)


def _shape_of(value: dict[str, Any]) -> _Shape:
    keys = tuple(key for key in value if isinstance(key, str))  # Parquet maps may have other keys
    return _cached_shape(keys) if sum(map(len, keys)) <= _CACHED_SHAPE_CHARS else _Shape(keys)


class Row:
    """A raw row that answers to paths.

    `inputs.question` is found as a nested object, as a literal dotted key, as a mix of both, in camelCase,
    and inside a string that holds a JSON object. A number steps into a list.
    """

    __slots__ = ("_memo", "_shape", "values")

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values
        # By id: what strings parse to and what objects' keys say. `values` keeps them alive.
        self._memo: dict[int, Any] = {}
        self._shape = _shape_of(values)

    def within(self, candidates: tuple[Path, ...]) -> tuple[Path, ...]:
        """Those of the paths whose first name the row has: where nothing else can be found."""
        return self._shape.within(candidates)

    def find(self, path: Path) -> Found | None:
        """The value under `path`, or None where there is none or it is null."""
        if path[0] not in self._shape.roots:
            return None
        found = self._descend(self.values, path)
        return None if found is None else Found(found[0], ".".join(found[1]))

    def has(self, name: str) -> bool:
        """Whether the row has this key in any spelling, null or not."""
        return name in self._shape.spellings

    def _descend(self, value: Any, path: Path) -> tuple[Any, Path] | None:
        if not path:
            return value, ()
        if isinstance(value, str):
            value = self._parsed(value)
        if isinstance(value, list):
            if not path[0].isdecimal() or int(path[0]) >= len(value) or value[int(path[0])] is None:
                return None
            below = self._descend(value[int(path[0])], path[1:])
            return below and (below[0], (path[0], *below[1]))
        if not isinstance(value, dict):
            return None
        spellings = self._spellings(value)
        for length in range(len(path), 0, -1):
            key = ".".join(path[:length])
            key = key if key in value else spellings.get(key, key)
            if value.get(key) is None:
                continue
            below = self._descend(value[key], path[length:])
            if below is not None:
                return below[0], (key, *below[1])
        return None

    def _spellings(self, value: dict[str, Any]) -> dict[str, str]:
        if value is self.values:
            return self._shape.spellings
        if id(value) not in self._memo:
            self._memo[id(value)] = _shape_of(value).spellings
        spellings: dict[str, str] = self._memo[id(value)]
        return spellings

    def _parsed(self, text: str) -> Any:
        if id(text) not in self._memo:
            self._memo[id(text)] = embedded(text)
        return self._memo[id(text)]
