"""What an audit of these logs would read, found out by reading a sample of them. Writes nothing.

Listing and cutting are the run's own, so files and units are exact. Fields, rejects and lengths come from the
first rows of a few units spread over the listing.
"""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain, groupby, islice, zip_longest
from typing import Any, BinaryIO

from detector.record import Record
from jobs.config import Config
from jobs.console import printable
from jobs.estimate import Estimate, Prices, SampledUnit, find_estimate
from jobs.formats import Accepted, Reject, read_rows, read_unit, resolved_mapping
from jobs.listing import InputFile, WorkUnit, cut, freeze
from jobs.plan_needs import Needs, find_needs
from jobs.storage import Storage, mask

_NEEDED = ("question", "passages", "answer")
_SAMPLED_UNITS = 16
_SAMPLED_ROWS = 50  # per unit
_COUNTED_ROWS = 1000  # per unit; of a longer one the bytes read until then say how many there are
_SHOWN_RECORDS = 3
_SHOWN_PASSAGES = 3
_SHOWN_FILES = 20
_SHOWN_CHARACTERS = 200
_FOLDED = (
    "  Spans fold within a file. Of a trace that is spread over files each part is a row, and a reject where "
    "it lacks root, answer or retrieval"
)
_CHARACTERS_PER_TOKEN = 4  # English prose with the vocabularies of the known scorers; other scripts need more


@dataclass(frozen=True, slots=True)
class Excerpt:
    """The beginning of a text from the logs, and how long all of it is."""

    text: str
    n_characters: int

    def __str__(self) -> str:
        more = self.n_characters - len(self.text)
        return printable(self.text) + (f"... ({more:,} more characters)" if more else "")


@dataclass(frozen=True, slots=True)
class ShownRecord:
    """One record as the audit will see it."""

    path: str
    position: int
    labels: dict[str, str]
    question: Excerpt
    n_passages: int
    undivided: bool
    passages: list[Excerpt]
    answer: Excerpt


@dataclass(frozen=True, slots=True)
class Mapping:
    """Our fields and the paths they are read from, in `n_units` of the sampled units, the first in `path`."""

    fields: dict[str, str]
    n_units: int
    path: str


@dataclass(frozen=True, slots=True)
class ShownTraces:
    """What the spans of one tracing system came to, in `n_units` of the sampled units, the first in `path`.

    A trace is a row. Other spans are of traces with neither retrieval nor answer; they are no rows.
    """

    system: str
    n_units: int
    n_spans: int
    n_repeated_spans: int
    n_traces: int
    n_other_spans: int
    n_other_traces: int
    path: str

    def __str__(self) -> str:
        return (
            f"{self.n_units:,} of the units are {self.system}, first {printable(self.path)}: "
            f"{self.n_spans:,} spans ({self.n_repeated_spans:,} repeated) are {self.n_traces:,} rows, one a "
            f"trace, and {self.n_other_spans:,} spans of {self.n_other_traces:,} traces without retrieval or "
            "answer"
        )


@dataclass(frozen=True, slots=True)
class ShownReject:
    """How many sampled rows are rejected for one reason, and the first of them."""

    reason: str
    n_rows: int
    path: str
    position: int
    detail: str

    def __str__(self) -> str:
        where = f"first at {self.position} of {printable(self.path)}"
        return f"{self.reason} {self.n_rows:,}, {where}: {printable(self.detail)}"


@dataclass(frozen=True, slots=True)
class Plan:
    """What an audit would read. Everything from `n_sampled_units` on is about the sample alone."""

    files: list[dict[str, Any]]
    """url, format, compression, size in bytes and system (whose spans it holds, else null) of every file, in
    the order they are read.
    """
    n_bytes: int
    n_units: int
    n_sampled_units: int
    n_sampled_rows: int
    n_accepted: int
    rejects: list[ShownReject]
    traces: list[ShownTraces]
    mappings: list[Mapping]
    records: list[ShownRecord]
    estimated_context_tokens_per_answer: float | None
    """Estimated from characters; None where no row was accepted."""
    estimated_answer_tokens_per_answer: float | None
    needs: Needs | None
    """Memory of a worker, and windows; None where no row was accepted or the scorer's files cannot tell."""
    needs_unknown: str | None
    """Why not."""
    estimate: Estimate | None
    """Tokens, time and cost of all of it; None where `needs` is."""

    def to_json(self) -> str:
        """One JSON object; the keys are the fields."""
        return json.dumps(asdict(self), indent=2)

    def to_text(self) -> str:
        """For a person on a terminal. Log text is cut visibly and its control characters are spelled out."""
        n_rejected = self.n_sampled_rows - self.n_accepted
        lines = [
            f"{len(self.files):,} files, {self.n_bytes:,} bytes, {self.n_units:,} units of work",
            *self._files(),
            "",
            f"Sample: {self.n_sampled_rows:,} rows of {self.n_sampled_units} units; "
            f"{self.n_accepted:,} can be audited, {n_rejected:,} are rejected",
            *[f"  {reject}" for reject in self.rejects],
            *[f"  {traces}" for traces in self.traces],
            *([_FOLDED] if self.traces else []),
            *self._tokens(),
            *self._needs(),
            *([f"  {printable(line)}" for line in self.estimate.to_lines()] if self.estimate else []),
        ]
        for mapping in self.mappings:
            lines += ["", *_mapping_lines(mapping, self.n_sampled_units)]
        for record in self.records:
            lines += ["", *_record_lines(record)]
        return "\n".join(lines)

    def _files(self) -> list[str]:
        lines = [
            f"  {' '.join(filter(None, (file['system'], file['format'], file['compression']))):<14} "
            f"{file['size']:>15,} bytes  {printable(file['url'])}"
            for file in self.files[:_SHOWN_FILES]
        ]
        left = Counter(file["format"] for file in self.files[_SHOWN_FILES:])
        if left:
            lines.append("  and " + ", ".join(f"{count:,} more {name}" for name, count in left.items()))
        return lines

    def _tokens(self) -> list[str]:
        context, answer = self.estimated_context_tokens_per_answer, self.estimated_answer_tokens_per_answer
        if context is None or answer is None:
            return []
        return [
            f"  about {context:,.0f} tokens of passages and {answer:,.0f} of answer each, "
            "guessed from characters"
        ]

    def _needs(self) -> list[str]:
        if self.needs is not None:
            return [f"  {line}" for line in self.needs.to_lines()]
        return [f"  memory: not known; {printable(self.needs_unknown)}"] if self.needs_unknown else []


def make_plan(logs: list[str], config: Config, prices: Prices = Prices()) -> Plan:  # noqa: B008, it is frozen
    """List and cut `logs` as an audit with `config` would, and read a sample.

    Raises ConfigError where the logs cannot be found or are of no known format, and as `find_estimate` does.
    """
    prices.check()
    storage = _Metered(config.storage)
    files = freeze(logs, storage, config.read)
    units = list(cut(files, storage, config.read))
    sample = units[:: max(1, -(-len(units) // _SAMPLED_UNITS))]
    counts = [Counter[str]() for _ in sample]
    outcomes, n_rows = [], []
    for unit, count in zip(sample, counts, strict=True):
        reading = read_unit(unit, storage, config, count)
        outcomes.append(list(islice(reading, _SAMPLED_ROWS)))
        n_rows.append(_count_rows(unit, storage, len(outcomes[-1]), reading))
    rows = list(chain.from_iterable(outcomes))
    accepted = [row for row in rows if isinstance(row, Accepted)]
    # The first record of every file, then the second: what differs between files is seen first.
    spread = [
        row
        for turn in zip_longest(*(list(file) for _, file in groupby(accepted, lambda row: row.path)))
        for row in turn
        if row is not None
    ]
    needs = find_needs([row.record for row in accepted], config, storage) if accepted else None
    estimate = None
    if isinstance(needs, Needs):
        tokens = iter(needs.tokens_per_record)
        sampled = [
            SampledUnit(n, [next(tokens) if isinstance(row, Accepted) else 0 for row in unit])
            for n, unit in zip(n_rows, outcomes, strict=True)
        ]
        estimate = find_estimate(sampled, len(units), needs, config, prices, storage)
    return Plan(
        files=[_shown_file(file) for file in files],
        n_bytes=sum(file.size for file in files),
        n_units=len(units),
        n_sampled_units=len(sample),
        n_sampled_rows=len(rows),
        n_accepted=len(accepted),
        rejects=_count_rejects([row for row in rows if isinstance(row, Reject)]),
        traces=_count_spans(sample, counts),
        mappings=_find_mappings(sample, storage, config),
        records=[_shown_record(row) for row in spread[:_SHOWN_RECORDS]],
        estimated_context_tokens_per_answer=_mean_tokens(
            [sum(len(passage.text) for passage in row.record.passages) for row in accepted]
        ),
        estimated_answer_tokens_per_answer=_mean_tokens([len(row.record.answer) for row in accepted]),
        needs=needs if isinstance(needs, Needs) else None,
        needs_unknown=needs if isinstance(needs, str) else None,
        estimate=estimate,
    )


@dataclass(frozen=True)
class _Metered(Storage):
    """Storage that can tell how much of a unit has been read."""

    opened: dict[str, BinaryIO] = field(default_factory=dict)

    def open(self, url: str, block_bytes: int | None = None) -> BinaryIO:
        self.opened[url] = super().open(url, block_bytes)
        return self.opened[url]

    def n_read(self, files: Sequence[WorkUnit]) -> int:
        """Bytes of these files that were read; all of a file that is closed or of Parquet rows."""
        return sum(self._read(file) for file in files)

    def _read(self, file: WorkUnit) -> int:
        opened, size = self.opened.get(file.url), file.stop - file.start
        if opened is None:
            return 0
        done = opened.closed or file.row_group is not None
        return size if done else min(size, max(0, opened.tell() - file.start))


def _count_rows(unit: WorkUnit, storage: _Metered, n_seen: int, rest: Iterator[Any]) -> float:
    """The rows of a unit of which `n_seen` were taken: counted, or by its bytes where it is long."""
    files = list(unit.files())
    n_counted, n_bytes = n_seen, storage.n_read(files)
    for _ in rest:
        n_counted += 1
        before, n_bytes = n_bytes, storage.n_read(files)
        # Files are read in blocks: only where the next one has just begun is the last one used up.
        if n_counted > _COUNTED_ROWS and 0 < before < n_bytes:
            size = sum(file.stop - file.start for file in files)
            return min((n_counted - 1) * size / before, unit.max_rows or float("inf"))
    return n_counted


def _find_mappings(sample: Sequence[WorkUnit], storage: Storage, config: Config) -> list[Mapping]:
    """The different mappings of the sample, most frequent first: two applications may log differently."""
    found: dict[str, list[str]] = {}
    for unit in sample:
        if unit.system is not None:  # its rows are made here, in our names
            continue
        raw = [values for _, values in islice(read_rows(unit, storage, config), _SAMPLED_ROWS)]
        fields = resolved_mapping([values for values in raw if isinstance(values, dict)], config)
        if fields:
            found.setdefault(json.dumps(fields), []).append(mask(unit.url))
    mappings = [Mapping(json.loads(fields), len(urls), urls[0]) for fields, urls in found.items()]
    return sorted(mappings, key=lambda mapping: -mapping.n_units)


def _count_spans(sample: Sequence[WorkUnit], counts: Sequence[Counter[str]]) -> list[ShownTraces]:
    units: dict[str, list[tuple[WorkUnit, Counter[str]]]] = {}
    for unit, count in zip(sample, counts, strict=True):
        if unit.system is not None:
            units.setdefault(unit.system, []).append((unit, count))
    names = ("spans", "repeated_spans", "traces", "other_spans", "other_traces")
    return [
        ShownTraces(
            system=system,
            n_units=len(found),
            path=mask(found[0][0].url),
            **{f"n_{name}": sum(count[name] for _, count in found) for name in names},
        )
        for system, found in units.items()
    ]


def _count_rejects(rejects: Sequence[Reject]) -> list[ShownReject]:
    first: dict[str, Reject] = {}
    for reject in rejects:
        first.setdefault(str(reject.reason), reject)
    counts = Counter(str(reject.reason) for reject in rejects)
    return [
        ShownReject(reason, count, first[reason].path, first[reason].position, first[reason].detail)
        for reason, count in counts.most_common()
    ]


def _shown_file(file: InputFile) -> dict[str, Any]:
    return {
        "url": mask(file.url),
        "format": file.format,
        "compression": file.compression,
        "size": file.size,
        "system": file.system,
    }


def _shown_record(row: Accepted) -> ShownRecord:
    record = row.record
    return ShownRecord(
        path=row.path,
        position=row.position,
        labels=_labels(record),
        question=_excerpt(record.question),
        n_passages=len(record.passages),
        undivided=record.undivided,
        passages=[_excerpt(passage.text) for passage in record.passages[:_SHOWN_PASSAGES]],
        answer=_excerpt(record.answer),
    )


def _labels(record: Record) -> dict[str, str]:
    names = ("response_id", "trace_id", "span_id", "timestamp", "app", "model", "retriever", "prompt_version")
    values = {name: getattr(record, name) for name in (*names, "language")}
    return {name: str(value) for name, value in values.items() if value is not None}


def _excerpt(text: str) -> Excerpt:
    return Excerpt(text[:_SHOWN_CHARACTERS], len(text))


def _mean_tokens(lengths: Sequence[int]) -> float | None:
    return sum(lengths) / len(lengths) / _CHARACTERS_PER_TOKEN if lengths else None


def _mapping_lines(mapping: Mapping, n_units: int) -> list[str]:
    return [
        f"Fields in {mapping.n_units} of these {n_units} units, first in {printable(mapping.path)}",
        *[f"  {ours:<15} from {printable(theirs)}" for ours, theirs in mapping.fields.items()],
        *[f"  {ours:<15} not found" for ours in _NEEDED if ours not in mapping.fields],
    ]


def _record_lines(record: ShownRecord) -> list[str]:
    labels = ", ".join(f"{name}={printable(value)}" for name, value in record.labels.items())
    left = record.n_passages - len(record.passages)
    return [
        f"Record at {record.position} of {printable(record.path)}",
        f"  labels    {labels}",
        f"  question  {record.question}",
        *[
            f"  {'context  ' if record.undivided else f'passage {i}'} {passage}"
            for i, passage in enumerate(record.passages, start=1)
        ],
        *([f"            ... ({left} more passages)"] if left else []),
        f"  answer    {record.answer}",
    ]
