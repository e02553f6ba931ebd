"""Measuring one work unit: rows in, Parquet parts out, then the marker. Holds the model; knows no queue."""

import logging
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from contextvars import copy_context
from dataclasses import asdict, replace
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

import detector
from detector.aggregate import Measurement
from detector.errors import RecordRejected, RejectReason
from detector.record import Record
from jobs.bundles import read_bundle
from jobs.commit import MEASUREMENTS, Marker, Run, write_marker
from jobs.config import Config
from jobs.errors import JobError
from jobs.formats.outcome import Accepted
from jobs.measured_rows import response_row, sentence_rows
from jobs.poison import Rows
from jobs.read_ahead import batches, read_ahead
from jobs.redaction import TEXTS, load_redaction, stored_texts, with_stored_ids
from jobs.stages import Stages
from jobs.storage import Storage
from jobs.tables import DIMENSIONS, MEASURED_RESPONSES, MEASURED_SENTENCES, REJECTS

if TYPE_CHECKING:
    from jobs.parts import Part

log = logging.getLogger("leadline")

Row = dict[str, Any]

SCHEMAS = {"responses": MEASURED_RESPONSES, "sentences": MEASURED_SENTENCES, "rejects": REJECTS}

_IDS = ("response_id", "trace_id", "span_id", *DIMENSIONS)
PACK_ROWS = 64
"""Rows that a scorer gets at once where it runs records in packs (`detector.packed`): about one pack at RAG's
usual one or two thousand tokens an answer. Where it walks them one by one, it gets them one by one.
"""

_WRITERS = 8
_KILLER = "measuring this record ends the worker's process, or takes longer than workers.stall_seconds"


class DeviceLost(Exception):  # noqa: N818 - what happened, to whoever has to replace the process
    """The accelerator is lost to this process: no later record could be measured either."""


def load_scorer(config: Config) -> Any:
    """The real scorer of a run. A plain function, so that Ray can name it to another process."""
    import torch

    from detector import Scorer

    place = config.bundle_place
    if place not in ("auto", "none"):
        bundle = read_bundle(place, Storage(config.storage))
    else:
        bundle = None if place == "none" else "auto"
    # The sum of a matrix product depends on how many threads split it: fixed, so that the numbers do not
    # depend on how many workers share a machine.
    torch.set_num_threads(config.workers.cpus_per_worker)
    return Scorer.load(
        config.scorer.name,
        device=config.scorer.device,
        dtype=config.scorer.dtype,
        window_tokens=config.scorer.window_tokens,
        cache_dir=config.scorer.cache_dir,
        profile=config.profile,
        bundle=bundle,
    )


class Worker:
    """One scorer and the units that it is given.

    Units may be given from two threads at a time. The device measures one after the other, in a thread of its
    own; meanwhile the rows of the next are read and the parts of the one before are written, so that it does
    not wait for storage between them.

    `load` makes the scorer from the settings; `alive` is called at every step of the work. Raises JobError
    when the scorer is not the one that run.json names, or judges by another bundle: a machine with other
    files under the same name must not write into this run.
    """

    def __init__(
        self,
        out: str,
        config: Config,
        run: Run,
        load: Callable[[Config], Any] = load_scorer,
        alive: Callable[[], None] = lambda: None,
    ) -> None:
        self._alive = alive
        self._out = out
        self._config = config
        self._run = run
        self._storage = Storage(config.storage)
        self._redact = load_redaction(config.redact)
        self._how = {
            "leave_one_out": config.loo != "off",
            "masked": config.loo == "masked",
            "least_share": config.least_share,
            "min_answer_tokens": config.read.min_answer_tokens,
        }
        # What a thread keeps of a device (its pool of OpenMP threads, cuBLAS's workspace) is kept once.
        self._device = ThreadPoolExecutor(1, "device")
        self._scorer = self._device.submit(load, config).result()
        self.dtype: str = self._scorer.dtype
        self._noise_floor = asdict(self._device.submit(self._scorer.noise_floor).result())
        if self._scorer.fingerprint != run.scorer["fingerprint"]:
            raise JobError(
                f"scorer {self._scorer.name}: its files here ({self._scorer.fingerprint}) are not those that "
                f"the run began with ({run.scorer['fingerprint']}); give every machine the same files"
            )
        bundle, wanted = self._scorer.bundle, run.scorer.get("bundle")
        here, then = bundle and bundle.digest, wanted and wanted["digest"]
        if here != then:
            raise JobError(
                f"bundle {config.bundle}: here it is {here}, when the run began it was {then}; "
                "give every machine the same version of Leadline and the same bundle"
            )

    def audit_unit(
        self,
        unit_json: Any,
        attempt: int = 1,
        aside: Collection[int] = (),
        seconds: Counter[str] | None = None,
    ) -> Marker:
        """Measure one unit, write its parts and then its marker, and return the marker.

        `seconds` is filled with what it took by stage: read (the device waits for rows; they are read ahead),
        measure, write.

        A record that cannot be measured is a reject and stops nothing. So is, without being measured, every
        row whose sequence number is in `aside`: those kill. Storage errors and DeviceLost pass through:
        nothing is committed, and the driver decides about another attempt.
        """
        seconds = Counter() if seconds is None else seconds
        stages = Stages(seconds, self._alive)
        unit = self._open(unit_json)
        n_read, tables, spans = self._measure(unit, stages, aside)
        held = sum(seconds.values())
        stages.begin()
        parts = self._write(unit.unit_id, tables)
        audited = [row for rows in tables["responses"].values() for row in rows]
        rejects = Counter(row["reason"] for rows in tables["rejects"].values() for row in rows)
        marker = {
            "unit_id": unit.unit_id,
            "parts": parts,
            "n_read": n_read,
            "n_audited": len(audited),
            "n_rejected": rejects.total(),
            "n_other_spans": spans["other_spans"],
            "rejects": dict(rejects),
            "n_tokens": sum(row["n_computed_tokens"] for row in audited),
            "dtype": self.dtype,
            "noise_floor_nats": self._noise_floor,
            "attempt": attempt,
            "seconds": round(held, 3),  # of the device: those of a worker's units add up to its time
        }
        if self._config.store_text == "flagged":
            marker["unit"] = unit.to_json()  # where the judge finds the texts
        # Another worker may have been faster; then that marker stands.
        marker = write_marker(self._storage, self._out, marker)
        stages.lap("write")
        return marker

    def _write(self, unit_id: str, tables: dict[str, dict[str, list[Row]]]) -> "list[Part]":
        """Write a part for each table and date. All at once: the device waits, and they wait for storage."""
        from jobs.parts import put_table

        def put(kind: str, date: str, rows: list[Row]) -> "Part":
            table = pa.Table.from_pylist(rows, schema=SCHEMAS[kind])
            return put_table(self._storage, self._out, f"{MEASUREMENTS}/{kind}", date, unit_id, table)

        with ThreadPoolExecutor(_WRITERS) as pool:
            # Each in a context of this one's, so that what is logged there still says which unit it is about.
            puts = [
                pool.submit(copy_context().run, put, kind, date, rows)
                for kind in SCHEMAS
                for date, rows in sorted(tables[kind].items())
            ]
            return [one.result() for one in puts]

    def probe_unit(self, unit_json: Any, rows: Rows) -> int:
        """Measure these rows of a unit as `audit_unit` does and commit nothing: can they be survived?

        Returns how many rows the unit has.
        """
        stages = Stages(Counter(), self._alive)
        return self._measure(self._open(unit_json), stages, only=range(*rows))[0]

    def _open(self, unit_json: Any) -> Any:
        from jobs.listing import WorkUnit

        unit = WorkUnit.from_json(unit_json)
        unit.check_unchanged(self._storage)
        return unit

    def _measure(
        self, unit: Any, stages: Stages, aside: Collection[int] = (), only: Collection[int] | None = None
    ) -> tuple[int, dict[str, dict[str, list[Row]]], Counter[str]]:
        """How many rows were read, the rows of each table by date, and what became of spans in the unit.

        Rows by their sequence number: those in `aside` are rejects, with `only` all others are passed over.
        """
        from jobs.formats import read_unit

        spans: Counter[str] = Counter()
        with closing(read_ahead(read_unit(unit, self._storage, self._config, spans))) as rows:
            # Here and not in the device's thread, which is busy with another unit while this one is opened.
            ready = chain(list(islice(rows, 1)), rows)
            # In this context, so that what is logged there still says which unit it is about.
            measure = copy_context().run
            measuring = self._device.submit(
                measure, self._measure_rows, ready, unit.partitions, stages, frozenset(aside), only
            )
            return *measuring.result(), spans

    def _measure_rows(
        self,
        rows: Iterable[Any],
        partitions: Any,
        stages: Stages,
        aside: Collection[int],
        only: Collection[int] | None,
    ) -> tuple[int, dict[str, dict[str, list[Row]]]]:
        from jobs.formats import record_date

        stages.begin()
        n_read = n_audited = 0
        tables: dict[str, dict[str, list[Row]]] = {kind: defaultdict(list) for kind in SCHEMAS}
        # By the rows of the unit alone, so that a unit done again is computed in the same packs.
        for batch in batches(rows, PACK_ROWS if self._scorer.packed else 1):
            numbered = list(enumerate(batch, n_read))
            n_read += len(batch)
            stages.lap("read")
            if only is not None:
                numbered = [(number, row) for number, row in numbered if number in only]
            for row, texts, outcome in self._outcomes(numbered, aside):
                subject = row.record if isinstance(row, Accepted) else row
                date = record_date(subject, partitions) or self._run.date
                place = {"path": row.path, "position": row.position}
                ids = {"run_id": self._run.run_id, "date": date} | place
                ids |= {name: getattr(subject, name) for name in _IDS}
                if isinstance(outcome, RecordRejected):
                    reject = {"reason": outcome.reason.value, "detail": outcome.detail}
                    tables["rejects"][date].append(ids | reject)
                    continue
                tables["responses"][date].append(ids | texts | response_row(outcome, n_audited))
                tables["sentences"][date] += sentence_rows(subject, outcome, n_audited)
                n_audited += 1
            stages.lap("measure")
        return n_read, tables

    def _outcomes(
        self, numbered: list[tuple[int, Any]], aside: Collection[int]
    ) -> list[tuple[Any, Row, Measurement | RecordRejected]]:
        """Rows that are measured together: each with its texts to store, and a measurement or why not."""
        found: dict[int, Measurement | RecordRejected] = {}
        records: dict[int, Record] = {}
        for number, row in numbered:
            if not isinstance(row, Accepted):
                found[number] = RecordRejected(row.reason, row.detail)
            elif number in aside:
                found[number] = RecordRejected(RejectReason.SCORING_FAILED, _KILLER)
            else:
                records[number] = row.record
        found |= zip(records, self._measure_records(list(records.values())), strict=True)
        return [self._as_stored(row, found[number]) for number, row in numbered]

    def _as_stored(
        self, row: Any, outcome: Measurement | RecordRejected
    ) -> tuple[Any, Row, Measurement | RecordRejected]:
        """The row with its ids as they are stored, what of its texts is stored now, and the outcome: a text
        that cannot be redacted is one.
        """
        texts: Row = dict.fromkeys(TEXTS)
        if isinstance(outcome, RecordRejected):
            return row, texts, outcome
        try:
            row = replace(row, record=with_stored_ids(row.record, self._redact))
            redacted = texts if self._config.store_text == "none" else stored_texts(row.record, self._redact)
        except RecordRejected as rejected:
            return row, texts, rejected
        # With `flagged` the judge reads them again, once it is known which.
        return row, redacted if self._config.store_text == "full" else texts, outcome

    def _measure_records(self, records: list[Record]) -> list[Measurement | RecordRejected]:
        if len(records) > 1:
            try:
                return list(self._scorer.measure_many(records, **self._how))
            except Exception as error:
                # One of them, or the pack: each alone shows whom it concerns.
                log.warning(
                    "a pack of %d records: %s; measured one by one", len(records), _reject(error).detail
                )
        return [self._measure_record(record) for record in records]

    def _measure_record(self, record: Record) -> Measurement | RecordRejected:
        try:
            measured: Measurement = self._scorer.measure(record, **self._how)
            return measured
        except RecordRejected as rejected:
            return rejected
        except Exception as error:
            return _reject(error)


def _reject(error: Exception) -> RecordRejected:
    """The reject for an error in the middle of a measurement. Raises DeviceLost where it is not the record's.

    Tells the type of the error and where it arose, not its message, which may quote the record.
    """
    import torch

    from detector.vocabulary import out_of_memory

    if isinstance(error, torch.AcceleratorError):
        raise DeviceLost(type(error).__name__) from error
    if out_of_memory(error):  # smaller tiles were tried (`detector.vocabulary.Tile`)
        torch.cuda.empty_cache()  # what this record took is garbage now, and the next may need it
        return RecordRejected(RejectReason.SCORING_FAILED, "the device's memory does not hold this record")
    root = Path(detector.__file__).parent
    frames = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).is_relative_to(root)]
    where = f" in detector/{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    return RecordRejected(RejectReason.SCORING_FAILED, type(error).__name__ + where)
