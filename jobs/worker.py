"""Measuring one work unit: rows in, Parquet parts out, then the marker. Holds the model; knows no queue."""

import os
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import astuple
from pathlib import Path
from typing import Any

import pyarrow as pa

import detector
from detector.aggregate import Features, Measurement
from detector.bundle import Verdict
from detector.errors import RecordRejected, RejectReason
from detector.record import Record
from jobs.bundles import read_bundle
from jobs.commit import MEASUREMENTS, Marker, Run, write_marker
from jobs.config import Config
from jobs.errors import JobError
from jobs.storage import Storage, mask
from jobs.tables import DIMENSIONS, FEATURES, MEASURED_RESPONSES, MEASURED_SENTENCES, REJECTS, VERDICT

Row = dict[str, Any]

SCHEMAS = {"responses": MEASURED_RESPONSES, "sentences": MEASURED_SENTENCES, "rejects": REJECTS}

_IDS = ("response_id", "trace_id", "span_id", *DIMENSIONS)
_MEASURED_COUNTS = (
    "n_passages",
    "n_context_tokens",
    "n_answer_tokens",
    "n_computed_tokens",
    "n_windows",
    "truncated",
)
_LONGEST_WAIT_SECONDS = 30.0


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
    """One scorer and the units that it is given, one after the other.

    `load` makes the scorer from the settings. Raises JobError when it is not the scorer that run.json names,
    or judges by another bundle: a machine with other files under the same name must not write into this run.
    """

    def __init__(
        self, out: str, config: Config, run: Run, load: Callable[[Config], Any] = load_scorer
    ) -> None:
        self._out = out
        self._config = config
        self._run = run
        self._storage = Storage(config.storage)
        self._scorer = load(config)
        self.dtype: str = self._scorer.dtype
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

    def audit_unit(self, unit_json: Any, attempt: int = 1) -> Marker:
        """Measure one unit, write its parts and then its marker, and return the marker.

        A record that cannot be measured is a reject and stops nothing. Storage errors and DeviceLost pass
        through: nothing is committed, and the driver decides about another attempt.
        """
        from jobs.listing import WorkUnit
        from jobs.parts import put_table

        started = time.monotonic()
        unit = WorkUnit.from_json(unit_json)
        if self._storage.stat(unit.url).etag != unit.etag:
            raise JobError(f"{mask(unit.url)}: changed since the run began; start anew with another --out")
        n_read, tables, spans = self._measure(unit)
        parts = [
            put_table(
                self._storage,
                self._out,
                f"{MEASUREMENTS}/{kind}",
                date,
                unit.unit_id,
                pa.Table.from_pylist(rows, schema=schema),
            )
            for kind, schema in SCHEMAS.items()
            for date, rows in sorted(tables[kind].items())
        ]
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
            "attempt": attempt,
            "seconds": round(time.monotonic() - started, 3),
        }
        write_marker(self._storage, self._out, marker)
        return marker

    def _measure(self, unit: Any) -> tuple[int, dict[str, dict[str, list[Row]]], Counter[str]]:
        """How many rows were read, the rows of each table by date, and what became of spans in the unit."""
        from jobs.formats import Accepted, read_unit, record_date

        n_read = n_audited = 0
        tables: dict[str, dict[str, list[Row]]] = {kind: defaultdict(list) for kind in SCHEMAS}
        spans: Counter[str] = Counter()
        for row in read_unit(unit, self._storage, self._config, spans):
            n_read += 1
            if isinstance(row, Accepted):
                subject, outcome = row.record, self._measure_record(row.record)
            else:
                subject, outcome = row, RecordRejected(row.reason, row.detail)
            date = record_date(subject, unit.partitions) or self._run.date
            ids = {"run_id": self._run.run_id, "date": date, "path": row.path, "position": row.position}
            ids |= {name: getattr(subject, name) for name in _IDS}
            if isinstance(outcome, RecordRejected):
                reject = {"reason": outcome.reason.value, "detail": outcome.detail}
                tables["rejects"][date].append(ids | reject)
                continue
            text = self._config.store_text == "full"
            tables["responses"][date].append(ids | _response_row(subject, outcome, n_audited, text=text))
            tables["sentences"][date] += _sentence_rows(subject, outcome, n_audited)
            n_audited += 1
        return n_read, tables, spans

    def _measure_record(self, record: Record) -> Measurement | RecordRejected:
        try:
            return self._scorer.measure(
                record,
                leave_one_out=self._config.loo != "off",
                masked=self._config.loo == "masked",
                least_share=self._config.least_share,
                min_answer_tokens=self._config.read.min_answer_tokens,
            )
        except RecordRejected as rejected:
            return rejected
        except Exception as error:
            return _reject(error)


class WorkerProcess:
    """A Worker as a Ray actor. No restarts and no retries of Ray's: the driver queues what was lost."""

    def __init__(self, *arguments: Any) -> None:
        self._worker = Worker(*arguments)

    def ready(self) -> str:
        """The dtype that the scorer computes in; answers once it is loaded."""
        return self._worker.dtype

    def audit_unit(self, unit_json: Any, attempt: int) -> Marker:
        """`Worker.audit_unit`. A second attempt waits a little: what failed is probably the storage."""
        time.sleep(min(2.0 ** (attempt - 1) - 1.0, _LONGEST_WAIT_SECONDS))
        try:
            return self._worker.audit_unit(unit_json, attempt)
        except DeviceLost:
            # A dead process is replaced and its unit done again; this one would only make rejects.
            traceback.print_exc()
            os._exit(1)


def _response_row(record: Record, measured: Measurement, record_index: int, *, text: bool) -> Row:
    passages = [{"id": p.id, "text": p.text, "source": p.source, "score": p.score} for p in record.passages]
    return {
        "record_index": record_index,
        "question": record.question if text else None,
        "answer": record.answer if text else None,
        "passages": passages if text else None,
        **_features(measured.features),
        "ensemble": measured.ensemble,
        "n_sentences": len(measured.sentences),
        **{name: getattr(measured, name) for name in _MEASURED_COUNTS},
    }


def _sentence_rows(record: Record, measured: Measurement, record_index: int) -> Iterator[Row]:
    for sentence in measured.sentences:
        piece = sentence.evidence
        yield {
            "record_index": record_index,
            "sentence_index": sentence.index,
            "start": sentence.start,
            "end": sentence.end,
            "n_tokens": sentence.n_tokens,
            "n_windows": sentence.n_windows,
            "truncated": sentence.truncated,
            **_features(sentence.features),
            **_verdict(sentence.verdict),
            "evidence_passage_index": piece and piece.passage_index,
            "evidence_passage_id": piece and record.passages[piece.passage_index].id,
            "evidence_start": piece and piece.start,
            "evidence_end": piece and piece.end,
        }


def _features(features: Features) -> Row:
    return {name: getattr(features, name) for name in (*FEATURES, "drops", "jsds")}


def _verdict(verdict: Verdict | None) -> Row:
    if verdict is None:
        return dict.fromkeys(VERDICT)
    return dict(zip(VERDICT, astuple(verdict), strict=True))


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
