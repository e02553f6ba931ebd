"""Cases that all contenders read in turns, and the JSON tree of what was measured.

Every figure of a comparison comes from one process and one run. Peak memory is measured apart, in a fresh
process per contender.
"""

import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from detector.errors import RecordRejected
from detector.noise import noise_floor
from detector.prompts import read_record
from detector.record import Passage, Record
from detector.scorer import Scorer
from jobs.bench_meters import (
    FIRST_USE,
    extra_peak_bytes,
    machine,
    matrix_rate,
    shares_of_time,
    time_rounds,
)
from jobs.bench_peers import Outcome, Read, ScorerSpec, largest_difference, reader
from jobs.bench_shapes import Cost, ModelSize, Shape, floor, generate
from jobs.errors import ConfigError

if TYPE_CHECKING:
    from jobs.config import Config

Say = Callable[[str], None]

SUITE = (Shape(310, 185, 5), Shape(2000, 200, 10), Shape(6000, 200, 20))
"""The first is the mean answer of RAGTruth QA (train), its context cut into five."""

_GENERATED, _LOGGED = 3, 8  # answers per round where nobody said how many


@dataclass(frozen=True, slots=True)
class Growth:
    """One thing that grows, the rest of the first shape staying: `passages` or `answers`."""

    axis: str
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Ask:
    """What to measure."""

    shapes: tuple[Shape, ...]
    modes: tuple[str, ...]
    peers: tuple[str, ...] = ()
    n_answers: int | None = None
    repeats: int = 5
    growth: tuple[Growth, ...] = ()
    memory: bool = True
    """Whether peak memory is measured; each contender costs a fresh process."""


@dataclass(frozen=True, slots=True)
class Case:
    """Records that all contenders read."""

    source: str
    """`generated`, or the logs."""
    records: tuple[Record, ...]


def bench(
    ask: Ask, spec: ScorerSpec, scorer: Scorer, cases: Sequence[Case], say: Say = lambda _: None
) -> dict[str, Any]:
    """Everything that is printed, as one JSON tree: machine, versions, scorer, cases, growth."""
    size = ModelSize.of(scorer.model)
    read = {name: reader(name, spec, scorer) for name in (*ask.modes, *ask.peers)}
    return {
        "machine": machine(),
        "versions": _versions(),
        "scorer": asdict(scorer.info) | {"profile": scorer.profile.name, "size": asdict(size)},
        "repeats": ask.repeats,
        "cases": [_measure(case, ask, spec, scorer, read, size, say) for case in cases],
        "growth": [_grow(growth, ask, scorer, read, say) for growth in ask.growth],
    }


def _measure(
    case: Case,
    ask: Ask,
    spec: ScorerSpec,
    scorer: Scorer,
    read: dict[str, Read],
    size: ModelSize,
    say: Say,
) -> dict[str, Any]:
    """One case: time of all contenders in turns, then what is not timed."""
    device, rates = scorer.model.device, list[float]()
    outcomes: dict[str, list[Outcome]] = {}
    read, dropped = _able(read, case, device)

    def read_all(name: str) -> None:
        outcomes[name] = [read[name](record) for record in case.records]

    tasks: dict[str, Callable[[], object]] = {name: partial(read_all, name) for name in read}
    tasks["matrix product"] = lambda: rates.append(matrix_rate(device, scorer.model.dtype))
    seconds = time_rounds(tasks, ask.repeats, device, say)
    readings = [
        read_record(record, scorer.tokenizer, scorer.profile, scorer.window_tokens) for record in case.records
    ]
    longest = max(range(len(readings)), key=lambda index: len(readings[index].windows[0].full))
    contenders = []
    for name in read:
        found = _timed(seconds[name], outcomes[name])
        if name in ask.modes:
            say(f"shares of time: {name}")
            least = sum((floor(reading, name) for reading in readings), Cost())
            rate = least.flops(size) / statistics.median(seconds[name])
            found |= {
                "floor_tokens": least.tokens,
                "tokens_over_floor": found["computed_tokens"] / least.tokens,
                "flop_utilisation": rate / statistics.median(rates),
                "shares": shares_of_time(scorer, partial(read[name], case.records[0])),
            }
        if "exact" in outcomes and name in ask.peers:
            found["difference_from_exact_nats"] = largest_difference(outcomes[name][0], outcomes["exact"][0])
        if ask.memory:
            say(f"peak memory: {name}")
            record = case.records[longest]
            found["extra_peak_bytes"] = extra_peak_bytes(name, spec, read[name], record, device)
        contenders.append({"name": name} | found)
    return {
        "source": case.source,
        "n_answers": len(case.records),
        "mean_context_tokens": statistics.mean(r.n_context_tokens for r in readings),
        "mean_answer_tokens": statistics.mean(len(r.answer_ids) for r in readings),
        "mean_pieces": statistics.mean(len(r.pieces) for r in readings),
        "mean_windows": statistics.mean(len(r.windows) for r in readings),
        "matrix_flops_per_second": statistics.median(rates),
        "contenders": contenders,
        "out_of_memory": dropped,
        "ratios": _ratios(contenders, ask),
        "noise_floor_nats": asdict(noise_floor(scorer, case.records[0])),
    }


def _able(read: dict[str, Read], case: Case, device: torch.device) -> tuple[dict[str, Read], list[str]]:
    """Who can read the first record at all (a GPU may be too small for some), everybody warmed up."""
    able, dropped = {}, []
    for name, way in read.items():
        try:
            way(case.records[0] if device.type == "cuda" else FIRST_USE)
            able[name] = way
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            dropped.append(name)
    return able, dropped


def _timed(seconds: list[float], outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Of one contender: what its rounds took, and the tokens of one round."""
    n_tokens, median = sum(outcome.n_tokens for outcome in outcomes), statistics.median(seconds)
    return {
        "seconds": seconds,
        "seconds_per_answer": _spread([s / len(outcomes) for s in seconds]),
        "answers_per_second": len(outcomes) / median,
        "tokens_per_second": n_tokens / median,
        "computed_tokens": n_tokens,
        "tokens_per_answer": n_tokens / len(outcomes),
    }


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def _ratios(contenders: Sequence[dict[str, Any]], ask: Ask) -> list[dict[str, Any]]:
    """How much longer each peer took than each mode, round by round, and how much more memory."""
    by_name = {contender["name"]: contender for contender in contenders}
    ratios = []
    for mode in (by_name[name] for name in ask.modes if name in by_name):
        for peer in (by_name[name] for name in ask.peers if name in by_name):
            rounds = zip(peer["seconds"], mode["seconds"], strict=True)
            found = {"mode": mode["name"], "peer": peer["name"], "time": _spread([p / m for p, m in rounds])}
            ours, theirs = mode.get("extra_peak_bytes"), peer.get("extra_peak_bytes")
            found["memory"] = theirs / ours if ours and theirs else None
            ratios.append(found)
    return ratios


def _grow(growth: Growth, ask: Ask, scorer: Scorer, read: dict[str, Read], say: Say) -> dict[str, Any]:
    """Time per answer of every mode while one thing grows; over passages, the straight line through it."""
    shape, n_answers = ask.shapes[0], ask.n_answers or _GENERATED
    outcomes: dict[tuple[str, int], list[Outcome]] = {}
    tasks: dict[str, Callable[[], object]] = {}

    def read_all(name: str, size: int, records: list[Record]) -> None:
        outcomes[name, size] = [read[name](record) for record in records]

    for size in growth.sizes:
        grown = replace(shape, passages=size) if growth.axis == "passages" else shape
        n_records = size if growth.axis == "answers" else n_answers
        records = generate(grown, n_records, scorer.tokenizer, scorer.profile.separator)
        for mode in ask.modes:
            tasks[f"{mode}, {growth.axis} = {size}"] = partial(read_all, mode, size, records)
    seconds = time_rounds(tasks, ask.repeats, scorer.model.device, say)
    modes = []
    for mode in ask.modes:
        rows = [
            {"size": size} | _timed(seconds[f"{mode}, {growth.axis} = {size}"], outcomes[mode, size])
            for size in growth.sizes
        ]
        line = _line(growth.sizes, rows) if growth.axis == "passages" else None
        modes.append({"name": mode, "sizes": rows, "line": line})
    return {"axis": growth.axis, "shape": asdict(shape), "modes": modes}


def _line(sizes: Sequence[int], rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Least squares of seconds per answer over K, and what a passage more costs in tokens."""
    x = np.array(sizes, dtype=float)
    y = np.array([row["seconds_per_answer"]["median"] for row in rows])
    slope, start = np.polyfit(x, y, 1)
    rest = y - (start + slope * x)
    spread = ((y - y.mean()) ** 2).sum()
    tokens = np.array([row["tokens_per_answer"] for row in rows])
    return {
        "seconds_per_passage": float(slope),
        "seconds_at_none": float(start),
        "r_squared": float(1 - (rest**2).sum() / spread) if spread else 1.0,
        "tokens_per_passage": float(np.polyfit(x, tokens, 1)[0]),
    }


def cases_of(logs: Sequence[str], config: "Config", ask: Ask, scorer: Scorer, *, joined: bool) -> list[Case]:
    """The records of the logs for the first case, where there are any; generated ones for the others.

    `joined` is the suite's way: passages of logs become one text that is cut into five, as `gasp-rag` does.
    """
    cases = []
    for index, shape in enumerate(ask.shapes):
        if logs and index == 0:
            records = _logged(logs, config, ask.n_answers or _LOGGED, scorer)
            cases.append(Case("logs", tuple(_join(record) if joined else record for record in records)))
        else:
            cases.append(generated(shape, ask.n_answers or (1 if joined and index else _GENERATED), scorer))
    return cases


def generated(shape: Shape, n_answers: int, scorer: Scorer) -> Case:
    """A case of `n_answers` made-up records. Raises ConfigError where the scorer cannot read such a shape."""
    records = generate(shape, n_answers, scorer.tokenizer, scorer.profile.separator)
    try:
        read_record(records[0], scorer.tokenizer, scorer.profile, scorer.window_tokens)
    except RecordRejected as rejected:
        raise ConfigError(f"{shape}: {scorer.name} cannot read that ({rejected.detail})") from None
    return Case("generated", tuple(records))


def _join(record: Record) -> Record:
    """Its passages as one text without boundaries: cut into five, as the GASP author's package does."""
    text = "\n".join(passage.text for passage in record.passages)
    return replace(record, passages=(Passage(text),), undivided=True)


def _logged(logs: Sequence[str], config: "Config", n_records: int, scorer: Scorer) -> list[Record]:
    """The first records of the logs that the scorer can read."""
    from jobs.formats import Accepted, read_unit
    from jobs.listing import cut, freeze
    from jobs.storage import Storage, mask

    storage = Storage(config.storage)
    found: list[Record] = []
    for unit in cut(freeze(logs, storage, config.read), storage, config.read):
        for row in read_unit(unit, storage, config):
            if len(found) == n_records:
                return found
            if isinstance(row, Accepted) and scorer.can_read(row.record):
                found.append(row.record)
    if not found:
        raise ConfigError(
            f"{', '.join(map(mask, logs))}: no answer there that can be read; see leadline plan"
        )
    return found


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {"python": sys.version.split()[0]}
    for package in ("leadline", "torch", "transformers", "numpy", "gasp-rag"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found
