"""Which responses of a run were read before: found on disk, in memory that does not grow with the responses.

A response id that comes again is a row that was logged twice. The first one in the order of reading stands.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import BinaryIO

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from jobs.findings import Place

_N_BUCKETS = 64  # each is sorted in memory: 6 MB at ten million responses

_SEEN = np.dtype(
    [
        # 16 bytes of the id's digest: two ids of a billion are one with a chance of 10**-21.
        ("high", "<u8"),
        ("low", "<u8"),
        ("unit", "<u4"),
        ("record", "<i4"),
        ("path", "<u4"),
        ("position", "<i8"),
    ]
)
_AGAIN = np.dtype([("unit", "<u4"), ("record", "<i4"), ("path", "<u4"), ("position", "<i8")])
_NOWHERE = -1  # the position of a row that has none


class Seen:
    """The ids of all responses, 36 bytes each in a temporary folder that goes at the end of its context."""

    def __init__(self) -> None:
        self._folder = TemporaryDirectory(prefix="leadline-judge-")
        self._files: dict[int, BinaryIO] = {}
        self._paths: dict[str, int] = {}

    def __enter__(self) -> "Seen":
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.close()
        self._folder.cleanup()

    def add(self, unit: int, responses: pa.Table) -> None:
        """Take in the responses of unit number `unit`, in the order in which they were read: units by number,
        and the responses of each.

        Columns: record_index, response_id (null: not known, never a duplicate), path, position.
        """
        known = responses.filter(responses["response_id"].is_valid())
        if not known.num_rows:
            return
        rows = np.zeros(known.num_rows, _SEEN)
        digests = b"".join(
            hashlib.blake2b(response_id.encode(), digest_size=16).digest()
            for response_id in known["response_id"].to_pylist()
        )
        halves = np.frombuffer(digests, "<u8").reshape(-1, 2)
        rows["high"], rows["low"] = halves[:, 0], halves[:, 1]
        rows["unit"] = unit
        rows["record"] = known["record_index"].to_numpy()
        rows["path"] = [self._paths.setdefault(path, len(self._paths)) for path in known["path"].to_pylist()]
        rows["position"] = known["position"].fill_null(_NOWHERE).to_numpy()
        buckets = rows["high"] % _N_BUCKETS
        for bucket in np.unique(buckets).tolist():
            self._file(bucket).write(rows[buckets == bucket].tobytes())

    def find(self) -> "Duplicates":
        """The responses whose id was read before. No more can be added."""
        found = []
        for bucket in sorted(self._files):
            self._files[bucket].close()
            found.append(_again(np.fromfile(self._name(bucket), _SEEN)))
        return Duplicates(np.concatenate([np.zeros(0, _AGAIN), *found]), tuple(self._paths))

    def _file(self, bucket: int) -> BinaryIO:
        if bucket not in self._files:
            self._files[bucket] = self._name(bucket).open("xb")
        return self._files[bucket]

    def _name(self, bucket: int) -> Path:
        return Path(self._folder.name, f"seen-{bucket}")


class Duplicates:
    """The responses that were read before, by the number of their unit: 20 bytes each."""

    def __init__(self, rows: NDArray[np.void], paths: Sequence[str]) -> None:
        self._rows = rows[np.lexsort((rows["record"], rows["unit"]))]
        self._paths = paths

    @classmethod
    def none(cls) -> "Duplicates":
        """No response came twice."""
        return cls(np.zeros(0, _AGAIN), ())

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def units(self) -> list[int]:
        """The numbers of the units that have any, in order."""
        return [int(unit) for unit in np.unique(self._rows["unit"])]

    def of(self, unit: int) -> dict[int, Place]:
        """record_index of each duplicate in a unit -> where the same response was read first."""
        first, stop = np.searchsorted(self._rows["unit"], [unit, unit + 1])
        return {
            record: (self._paths[path], None if position == _NOWHERE else position)
            for _, record, path, position in self._rows[first:stop].tolist()
        }


def _again(rows: NDArray[np.void]) -> NDArray[np.void]:
    """All but the first of each group of equal digests, each with the place of that first one.

    `rows` in the order of reading, which sorting by digest keeps.
    """
    rows = rows[np.lexsort((rows["low"], rows["high"]))]
    new = np.ones(len(rows), bool)
    new[1:] = (rows["high"][1:] != rows["high"][:-1]) | (rows["low"][1:] != rows["low"][:-1])
    first = np.maximum.accumulate(np.where(new, np.arange(len(rows)), 0))
    again = np.flatnonzero(~new)
    found = np.zeros(len(again), _AGAIN)
    found["unit"], found["record"] = rows["unit"][again], rows["record"][again]
    found["path"], found["position"] = rows["path"][first[again]], rows["position"][first[again]]
    return found
