"""The dashboards' table: additive counts per date, app, model, retriever, prompt version and language."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from detector.calibration import Moments
from jobs.errors import JobError
from jobs.parts import delete_stale, encode, partition
from jobs.storage import Storage, join
from jobs.tables import DIMENSIONS, REASONS, SUMMARY

KEY = ("date", *DIMENSIONS)
"""What a row is grouped by. A missing value is a group of its own: nothing disappears."""

COUNTS = tuple(field.name for field in SUMMARY if pa.types.is_integer(field.type))
"""The additive whole-number columns."""

_FOOTER_BYTES = 1 << 16  # fetched at a time: a count needs the footer and one narrow column
Z_95 = 1.959963984540054  # the standard normal's 97.5 % point


def wilson(k: int, n: int) -> tuple[float, float]:
    """95 % Wilson score interval of k successes in n >= 1 trials, within [0, 1].

    Unlike p +- 1.96 sd it stays inside [0, 1] and is wide where little was seen. It takes the answers as
    independent draws.
    """
    share = k / n
    centre = share + Z_95**2 / (2 * n)
    half = Z_95 * math.sqrt(share * (1 - share) / n + (Z_95 / (2 * n)) ** 2)
    whole = 1 + Z_95**2 / n
    # At the ends the exact bound is the end itself; the arithmetic misses it by a rounding.
    return (centre - half) / whole if k else 0.0, (centre + half) / whole if k < n else 1.0


class Tally:
    """The summary while it is being counted: grows with the number of groups, not of rows.

    The order of adding does not matter, to the last bit of the float sums.
    """

    def __init__(self) -> None:
        self._counts: defaultdict[tuple[Any, ...], Counter[str]] = defaultdict(Counter)
        self._scores: defaultdict[tuple[Any, ...], Moments] = defaultdict(Moments)

    def add(self, responses: pa.Table, sentences: pa.Table, rejects: pa.Table) -> None:
        """Count findings (responses, sentences) and rejects of the same answers. Raises JobError for a
        reject reason that the summary has no column for.
        """
        for key, rows in _groups(responses, ("flagged", "truncated", "n_context_tokens", "n_answer_tokens")):
            self._counts[key].update(
                n_responses=rows.num_rows,
                n_flagged_responses=_sum(rows["flagged"]),
                n_truncated=_sum(rows["truncated"]),
                n_context_tokens=_sum(rows["n_context_tokens"]),
                n_answer_tokens=_sum(rows["n_answer_tokens"]),
            )
        for key, rows in _groups(sentences, ("flagged", "evidence_passage_index", "score")):
            self._counts[key].update(
                n_sentences=rows.num_rows,
                n_flagged_sentences=_sum(rows["flagged"]),
                n_no_evidence=rows["evidence_passage_index"].null_count,
            )
            self._scores[key] += Moments.of(rows["score"].to_numpy())
        for key, rows in _groups(rejects, ("reason",)):
            for reason, count in Counter(rows["reason"].to_pylist()).items():
                if reason not in REASONS:
                    raise JobError(f"rejects name the reason {reason!r}; known: {', '.join(REASONS)}")
                self._counts[key].update({"n_rejected": count, f"n_{reason}": count})

    def merge(self, other: "Tally") -> None:
        """Add what another tally has counted."""
        for key, counts in other._counts.items():
            self._counts[key].update(counts)
        for key, scores in other._scores.items():
            self._scores[key] += scores

    def table(self, run_id: str) -> pa.Table:
        """The summary rows, sorted by date and dimensions, missing values first.

        `sum_score` and `sum_score_sq` are over sentences: sum_score / n_sentences is the mean score.
        """
        rows = []
        for key in sorted(self._counts, key=lambda key: [(value is not None, value or "") for value in key]):
            counts = self._counts[key]
            responses, flagged = counts["n_responses"], counts["n_flagged_responses"]
            row: dict[str, Any] = {"run_id": run_id} | dict(zip(KEY, key, strict=True))
            row |= {name: counts[name] for name in COUNTS}
            row |= {"n_audited": responses, "n_read": responses + counts["n_rejected"]}
            row |= {"sum_score": self._scores[key].total, "sum_score_sq": self._scores[key].total_squares}
            rows.append(row | _rate(flagged, responses))
        return pa.Table.from_pylist(rows, schema=SUMMARY)


def totals(summary: pa.Table) -> dict[str, Any]:
    """The summary's counts summed over all rows, and `flagged_rate`, `ci_low`, `ci_high` of the whole (None
    where nothing was audited).
    """
    counts = {name: _sum(summary[name]) for name in COUNTS}
    return counts | _rate(counts["n_flagged_responses"], counts["n_responses"])


def write_summary(out: str, storage: Storage, summary: pa.Table) -> None:
    """Write `OUT/summary/date=.../summary.parquet`, one per date, then delete the dates that are no more."""
    kept = set()
    for date in pc.unique(summary["date"]).to_pylist():
        suffix = f"summary/{partition(date)}/summary.parquet"
        storage.write(join(out, suffix), encode(summary.filter(pc.equal(summary["date"], date))))
        kept.add(suffix)
    delete_stale(storage, out, "summary", r"summary/date=\d{4}-\d\d-\d\d/summary\.parquet", kept)


def recount(out: str, storage: Storage, units: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Count OUT again from the Parquet files themselves, for `_SUCCESS`.

    All findings and duplicates that are there, and the rejects of these units (parts of attempts that never
    got a marker do not count). The keys are those of `totals` and must have the same values.
    """
    rejects = [
        join(out, part["url_suffix"])
        for unit in units
        for part in unit["parts"]
        if part["table"] == "rejects"
    ] + [
        stored.url
        for stored in storage.list(join(out, "measurements", "rejects"))
        if stored.url.rsplit("/", 1)[-1].startswith("duplicates-")
    ]
    counts: Counter[str] = Counter(
        dict.fromkeys(("n_responses", "n_flagged_responses", "n_sentences", "n_flagged_sentences"), 0)
    )
    with ThreadPoolExecutor(8) as pool:
        for kind in ("responses", "sentences"):
            urls = [f.url for f in storage.list(join(out, "findings", kind)) if f.url.endswith(".parquet")]
            for flagged in pool.map(lambda url: _read_flagged(storage, url), urls):
                counts.update({f"n_{kind}": len(flagged), f"n_flagged_{kind}": _sum(flagged)})
        n_rejected = sum(pool.map(lambda url: _count_rows(storage, url), rejects))
    return dict(counts) | {
        "n_read": counts["n_responses"] + n_rejected,
        "n_audited": counts["n_responses"],
        "n_rejected": n_rejected,
    }


def _groups(table: pa.Table, columns: tuple[str, ...]) -> Iterator[tuple[tuple[Any, ...], pa.Table]]:
    rows: defaultdict[tuple[Any, ...], list[int]] = defaultdict(list)
    for row, key in enumerate(zip(*(table[name].to_pylist() for name in KEY), strict=True)):
        rows[key].append(row)
    for key, indices in rows.items():
        yield key, table.select(columns).take(pa.array(indices, pa.int64()))


def _sum(column: pa.ChunkedArray) -> int:
    return pc.sum(column).as_py() or 0


def _rate(k: int, n: int) -> dict[str, float | None]:
    if n == 0:
        return dict.fromkeys(("flagged_rate", "ci_low", "ci_high"))
    low, high = wilson(k, n)
    return {"flagged_rate": k / n, "ci_low": low, "ci_high": high}


def _read_flagged(storage: Storage, url: str) -> pa.ChunkedArray:
    with storage.open(url, block_bytes=_FOOTER_BYTES) as file:
        return pq.ParquetFile(file).read(columns=["flagged"])["flagged"]


def _count_rows(storage: Storage, url: str) -> int:
    with storage.open(url, block_bytes=_FOOTER_BYTES) as file:
        return pq.ParquetFile(file).metadata.num_rows
