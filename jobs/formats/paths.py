"""Looking a dotted path up in a raw row, whatever its spelling and nesting."""

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


@lru_cache(maxsize=4096)
def snake(name: str) -> str:
    """One spelling: retrievalContext, Retrieval Context and RETRIEVAL_CONTEXT are retrieval_context."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name.strip())
    return re.sub(r"[\s-]+", "_", words).lower()


class Row:
    """A raw row that answers to paths.

    `inputs.question` is found as a nested object, as a literal dotted key, as a mix of both, in camelCase,
    and inside a string that holds a JSON object. A number steps into a list.
    """

    __slots__ = ("_memo", "_roots", "values")

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values
        # By id: what strings parse to and how objects spell their keys. `values` keeps the keys alive.
        self._memo: dict[int, Any] = {}
        # Most of the paths that are tried lead nowhere, and the first name tells.
        self._roots = {name.split(".", 1)[0] for pair in self._spellings(values).items() for name in pair}

    def find(self, path: Path) -> Found | None:
        """The value under `path`, or None where there is none or it is null."""
        if path[0] not in self._roots:
            return None
        found = self._descend(self.values, path)
        return None if found is None else Found(found[0], ".".join(found[1]))

    def has(self, name: str) -> bool:
        """Whether the row has this key in any spelling, null or not."""
        return name in self._spellings(self.values)

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
        spellings = self._memo.get(id(value))
        if spellings is None:
            # Reversed, so that the first of two keys with one meaning wins. Parquet maps may have other keys.
            keys = [key for key in value if isinstance(key, str)]
            spellings = self._memo[id(value)] = {snake(key): key for key in reversed(keys)}
        return spellings

    def _parsed(self, text: str) -> Any:
        if id(text) not in self._memo:
            self._memo[id(text)] = embedded(text)
        return self._memo[id(text)]
