"""What an audit of these logs would read, found out by reading a sample of them. Writes nothing.

Listing and cutting are the run's own, so files and units are exact. Fields, rejects and lengths come from the
first rows of a few units spread over the listing.
"""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import chain, islice, zip_longest
from typing import Any

from detector.record import Record
from jobs.config import Config
from jobs.console import printable
from jobs.formats import Accepted, Malformed, Reject, read_rows, read_unit, resolved_mapping
from jobs.listing import InputFile, WorkUnit, cut, freeze
from jobs.storage import Storage, mask

_NEEDED = ("question", "passages", "answer")
_SAMPLED_UNITS = 16
_SAMPLED_ROWS = 50  # per unit
_SHOWN_RECORDS = 3
_SHOWN_PASSAGES = 3
_SHOWN_FILES = 20
_SHOWN_CHARACTERS = 200
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
    """url, format, compression and size in bytes of every file, in the order they are read."""
    n_bytes: int
    n_units: int
    n_sampled_units: int
    n_sampled_rows: int
    n_accepted: int
    rejects: list[ShownReject]
    mappings: list[Mapping]
    records: list[ShownRecord]
    estimated_context_tokens_per_answer: float | None
    """Estimated from characters; None where no row was accepted."""
    estimated_answer_tokens_per_answer: float | None

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
            *self._tokens(),
        ]
        for mapping in self.mappings:
            lines += ["", *_mapping_lines(mapping, self.n_sampled_units)]
        for record in self.records:
            lines += ["", *_record_lines(record)]
        return "\n".join(lines)

    def _files(self) -> list[str]:
        lines = [
            f"  {' '.join(filter(None, (file['format'], file['compression']))):<14} "
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
            f"  about {context:,.0f} tokens of passages and {answer:,.0f} of answer each, guessed from "
            "characters; time and cost are not estimated yet"
        ]


def make_plan(logs: list[str], config: Config) -> Plan:
    """List and cut `logs` as an audit with `config` would, and read a sample.

    Raises ConfigError where the logs cannot be found or are of no known format.
    """
    storage = Storage(config.storage)
    files = freeze(logs, storage, config.read)
    units = list(cut(files, storage, config.read))
    sample = units[:: max(1, -(-len(units) // _SAMPLED_UNITS))]
    outcomes = [list(islice(read_unit(unit, storage, config), _SAMPLED_ROWS)) for unit in sample]
    rows = list(chain.from_iterable(outcomes))
    accepted = [row for row in rows if isinstance(row, Accepted)]
    # The first record of every unit, then the second: what differs between files is seen first.
    spread = [
        row
        for turn in zip_longest(*([o for o in unit if isinstance(o, Accepted)] for unit in outcomes))
        for row in turn
        if row is not None
    ]
    return Plan(
        files=[_shown_file(file) for file in files],
        n_bytes=sum(file.size for file in files),
        n_units=len(units),
        n_sampled_units=len(sample),
        n_sampled_rows=len(rows),
        n_accepted=len(accepted),
        rejects=_count_rejects([row for row in rows if isinstance(row, Reject)]),
        mappings=_find_mappings(sample, storage, config),
        records=[_shown_record(row) for row in spread[:_SHOWN_RECORDS]],
        estimated_context_tokens_per_answer=_mean_tokens(
            [sum(len(passage.text) for passage in row.record.passages) for row in accepted]
        ),
        estimated_answer_tokens_per_answer=_mean_tokens([len(row.record.answer) for row in accepted]),
    )


def _find_mappings(sample: Sequence[WorkUnit], storage: Storage, config: Config) -> list[Mapping]:
    """The different mappings of the sample, most frequent first: two applications may log differently."""
    found: dict[str, list[str]] = {}
    for unit in sample:
        raw = [values for _, values in islice(read_rows(unit, storage, config), _SAMPLED_ROWS)]
        fields = resolved_mapping([values for values in raw if not isinstance(values, Malformed)], config)
        if fields:
            found.setdefault(json.dumps(fields), []).append(mask(unit.url))
    mappings = [Mapping(json.loads(fields), len(urls), urls[0]) for fields, urls in found.items()]
    return sorted(mappings, key=lambda mapping: -mapping.n_units)


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
