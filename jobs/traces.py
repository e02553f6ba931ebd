"""Traces on disk, by content: measuring a labelled answer twice costs one forward pass.

One safetensors file per record and window. The name is a hash of everything that the numbers depend on: the
record's text, the scorer's files and dtype, the prompt profile, and whether leave-one-out was masked. What a
file keeps may be more than a caller needs; where it is less, the record is measured again and the file
replaced.
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from detector.probe import Keep
from detector.record import Record
from detector.trace import Piece, Trace

_ARRAYS = tuple(
    f.name for f in fields(Trace) if f.name not in ("pieces", "layers") and not f.name.startswith("n_")
)
_ALWAYS = {"token_ids", "offsets", "jsd_no_context"} | {
    f"{what}{condition}" for what in ("logprob", "entropy") for condition in ("", "_no_context")
}
_COUNTS = tuple(f.name for f in fields(Trace) if f.name.startswith("n_"))
_VERSION = "1"


def trace_key(record: Record, scorer: Any, keep: Keep = Keep()) -> str:  # noqa: B008
    """32 hex digits of what a trace depends on. `scorer` is a detector.Scorer.

    What `keep` asks for is no part of it, except that masked leave-one-out, and one that skips pieces, give
    other numbers than exact under the same names.
    """
    content: list[object] = [
        _VERSION,
        scorer.fingerprint,
        scorer.dtype,
        scorer.window_tokens,
        scorer.profile.name,
        record.question,
        [p.text for p in record.passages],
        record.undivided,
        record.answer,
        record.language,
    ]
    if keep.leave_one_out and keep.masked:
        content.append("masked")
    if keep.leave_one_out and keep.least_share:
        content.append(keep.least_share)
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:32]


class TraceStore:
    """A folder of traces. Files are written beside and renamed: a reader sees a whole file or none."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = Path(folder).expanduser()
        self._folder.mkdir(parents=True, exist_ok=True)

    def get(self, key: str, keep: Keep) -> tuple[Trace, ...] | None:
        """The traces of a record's windows, or None where they were not kept or lack what `keep` asks for.

        Only the wanted layers are read, in the wanted order.
        """
        traces: list[Trace] = []
        while (path := self._path(key, len(traces))).exists():
            try:
                read = _read(path, keep)
            except (SafetensorError, KeyError, ValueError):
                return None
            if read is None:
                return None
            trace, n_windows = read
            traces.append(trace)
            if n_windows == len(traces):
                return tuple(traces)
        return None

    def put(self, key: str, traces: Sequence[Trace]) -> None:
        """Keep the traces of a record's windows, and what was kept of them before."""
        for index in reversed(range(len(traces))):  # the first file last: it is what `get` looks for
            arrays, meta = _pack(traces[index])
            meta["n_windows"] = str(len(traces))
            _add_old(arrays, meta, self._path(key, index))
            handle, temporary = tempfile.mkstemp(dir=self._folder, suffix=".part")
            os.close(handle)
            save_file(arrays, temporary, metadata=meta)
            Path(temporary).replace(self._path(key, index))

    def _path(self, key: str, window: int) -> Path:
        return self._folder / f"{key}-{window}.safetensors"


def _add_old(arrays: dict[str, Any], meta: dict[str, str], path: Path) -> None:
    """Put the arrays of an earlier file over new ones of the same name: methods that are measured in turn
    must not drive each other out, and a number that was used once stays what it was.
    """
    try:
        with safe_open(path, "numpy") as file:
            old = file.metadata() or {}
            if any(old.get(name) != meta[name] for name in ("n_windows", "pieces")):
                return
            states = set(json.loads(meta["layers"])) <= set(json.loads(old["layers"]))
            states &= "carried" in file.keys() or "carried" not in arrays
            kept = set(file.keys()) - (set() if states else {"states", "carried"})
            arrays |= {name: file.get_tensor(name) for name in kept}
            meta["counts"] = old["counts"]
            if states:
                meta["layers"] = old["layers"]
    except (OSError, SafetensorError, KeyError, ValueError):
        return


def _pack(trace: Trace) -> tuple[dict[str, Any], dict[str, str]]:
    arrays = {name: np.ascontiguousarray(getattr(trace, name)) for name in _ARRAYS if _is_array(trace, name)}
    meta = {
        "counts": json.dumps({name: getattr(trace, name) for name in (*_COUNTS, "truncated", "skipped")}),
        "pieces": json.dumps([[p.passage_index, p.start, p.end] for p in trace.pieces]),
        "layers": json.dumps(trace.layers),
    }
    return arrays, meta


def _is_array(trace: Trace, name: str) -> bool:
    return isinstance(getattr(trace, name), np.ndarray)


def _read(path: Path, keep: Keep) -> tuple[Trace, int] | None:
    """The trace of one window and how many windows there are; None where the file lacks what is wanted."""
    with safe_open(path, "numpy") as file:
        meta, names = file.metadata() or {}, set(file.keys())
        layers = tuple(json.loads(meta["layers"]))
        if not _ALWAYS | wanted(keep) <= names or not set(keep.layers) <= set(layers):
            return None
        skip = {"states", "carried"}
        arrays = {name: file.get_tensor(name) for name in names - skip}
        if keep.layers:
            rows = [layers.index(layer) for layer in keep.layers]
            for name in wanted(keep) & skip:
                part = file.get_slice(name)
                arrays[name] = np.stack([part[row] for row in rows])
        values: dict[str, Any] = {"logprob_without": None, "jsd_without": None}
        values |= arrays | json.loads(meta["counts"])
        values["skipped"] = tuple(values.get("skipped", ()))
        pieces = tuple(Piece(*piece) for piece in json.loads(meta["pieces"]))
        return Trace(pieces=pieces, layers=keep.layers, **values), int(meta["n_windows"])


def wanted(keep: Keep) -> set[str]:
    """Names of the optional Trace arrays that `keep` asks for."""
    names: set[str] = set()
    if keep.leave_one_out:
        names |= {"logprob_without", "jsd_without"}
    if keep.extremes:
        names |= {"top_logprob", "bottom_logprob", "rank"}
    if keep.foil:
        names.add("mmd_foil")
    if keep.attention:
        names |= {"attention_passages", "attention_answer"}
    if keep.piece_attention:
        names |= {"attention_pieces"}
    if keep.layers:
        names |= {"states"} | ({"carried"} if keep.carried else set())
    return names
