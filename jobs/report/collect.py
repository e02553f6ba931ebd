"""Read OUT into a Page: counts from the summary, cards from the parts, provenance from run.json."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from detector.calibration import Reference
from detector.errors import ProfileError
from detector.methods import METHODS
from jobs.commit import Run, read_run
from jobs.config import Config
from jobs.errors import JobError
from jobs.report.cards import collect_cards
from jobs.report.excerpt import label
from jobs.report.page import (
    Basis,
    Card,
    Coverage,
    Page,
    ReasonCount,
    RejectRow,
    Scale,
    Share,
    Slice,
    SliceTable,
    Where,
)
from jobs.report.provenance import collect_provenance
from jobs.report.rows import find_methods, read_rows
from jobs.report.wording import LIMITS, REASONS, explain_decision
from jobs.storage import Storage, join, mask
from jobs.summary import totals, wilson
from jobs.tables import DIMENSIONS, SUMMARY
from jobs.tables import REASONS as REASON_NAMES

MAX_SLICES = 60
MAX_VALUES = 8
MAX_REJECTS = 20
MAX_EMPTY_FILES = 5
SMALL_ANSWERS = 30
"""A slice of fewer answers is marked: its interval spans most of the scale."""

_ALWAYS = ("app", "model", "retriever")

Key = tuple[str | None, ...]
Row = dict[str, Any]


def collect(out: str, storage: Storage, config: Config) -> Page:
    """Everything that the page of the run in `out` shows.

    Memory is set by the number of cards and of summary rows, not of answers. Raises ConfigError where `out`
    holds no run, JobError where it is not judged yet or its files cannot be read.
    """
    run = read_run(storage, out)
    reference = _read_reference(storage, out)
    summary = _read_summary(storage, out)
    counts = totals(summary)
    method = reference.deciding_method
    others = tuple(name for name in find_methods(storage, out) if name != method)
    scale = _scale(summary, reference)
    bundle = run.scorer.get("bundle", {})
    store_text = run.config.get("store_text", "full")
    cards = collect_cards(
        storage, out, config.report.cards, scale, others, METHODS[method].trained, store_text
    )
    leave_one_out = run.config.get("loo") != "off"
    return Page(
        title=config.report.title,
        run_id=run.run_id,
        dates=_dates(summary, run),
        basis=Basis(
            given=reference.threshold is not None and reference.threshold_from != run.run_id,
            threshold_from=reference.threshold_from,
            flag_budget=reference.flag_budget,
            target_fpr=reference.target_fpr,
            data=bundle.get("data"),
        ),
        method=method,
        trained=METHODS[method].trained,
        answers=_share(counts["n_flagged_responses"], counts["n_responses"]),
        sentences=_share(counts["n_flagged_sentences"], counts["n_sentences"]),
        n_without_evidence=counts["n_no_evidence"],
        leave_one_out=leave_one_out,
        evidence_floor_nats=config.judge.evidence_floor_nats,
        coverage=_coverage(counts, run),
        where=_where(summary, cards),
        scale=scale,
        methods=others,
        cards=cards,
        rejects=_rejects(storage, out, run),
        provenance=collect_provenance(run, reference, config, out),
        decides=explain_decision(method, run.config.get("loo", "exact"), config.judge.evidence_floor_nats),
        limits=(bundle["limits"], *LIMITS) if METHODS[method].trained and bundle else LIMITS,
        store_text=store_text,
        n_withheld=sum(
            len(part) - part["withheld"].null_count
            for _, part in (read_rows(storage, out, "texts", ["withheld"]) if store_text == "flagged" else ())
        ),
    )


def _read_reference(storage: Storage, out: str) -> Reference:
    url = join(out, "profile.json")
    try:
        return Reference.from_json(storage.read(url))
    except FileNotFoundError:
        raise JobError(
            f"{mask(out)}: the run in it is not judged yet; finish it with the same `leadline audit` command"
        ) from None
    except ProfileError as error:
        raise JobError(f"{mask(url)}: {error}; write it again with `leadline judge {mask(out)}`") from None


def _read_summary(storage: Storage, out: str) -> pa.Table:
    parts = read_rows(storage, out, "summary", SUMMARY.names)
    return pa.concat_tables([SUMMARY.empty_table(), *(part for _, part in parts)])


def _dates(summary: pa.Table, run: Run) -> str:
    dates = sorted(set(summary["date"].to_pylist())) or [run.date]
    return dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"


def _share(count: int, total: int) -> Share:
    if total == 0:
        return Share(count, total, None, None, None)
    return Share(count, total, count / total, *wilson(count, total))


def _scale(summary: pa.Table, reference: Reference) -> Scale | None:
    """Shade from one deviation under the mean score to as far above the threshold, probabilities 0 to 1."""
    n = pc.sum(summary["n_sentences"]).as_py() or 0
    if reference.threshold is None or n == 0:
        return None
    if METHODS[reference.deciding_method].trained:
        return Scale(0.0, 1.0, reference.threshold)
    mean = pc.sum(summary["sum_score"]).as_py() / n
    square = pc.sum(summary["sum_score_sq"]).as_py() / n
    deviation = max(square - mean * mean, 0.0) ** 0.5 or 1.0
    threshold = reference.threshold
    return Scale(min(mean, threshold) - deviation, max(mean, threshold) + deviation, threshold)


def _coverage(counts: dict[str, int], run: Run) -> Coverage:
    empty = [mask(str(file.get("url", ""))) for file in run.files if file.get("size") == 0]
    found = {reason: counts[f"n_{reason}"] for reason in REASON_NAMES if counts[f"n_{reason}"]}
    return Coverage(
        n_read=counts["n_read"],
        n_audited=counts["n_audited"],
        n_rejected=counts["n_rejected"],
        reasons=tuple(
            ReasonCount(reason, count, REASONS[reason])
            for reason, count in sorted(found.items(), key=lambda item: (-item[1], item[0]))
        ),
        n_files=len(run.files),
        n_empty_files=len(empty),
        empty_files=tuple(label(url) or "" for url in empty[:MAX_EMPTY_FILES]),
        n_truncated=counts["n_truncated"],
    )


def _where(summary: pa.Table, cards: tuple[Card, ...]) -> Where:
    rows = [row for row in summary.to_pylist() if row["n_responses"]]
    varying = [name for name in DIMENSIONS if len({row[name] for row in rows}) > 1]
    dimensions = tuple(name for name in DIMENSIONS if name in (*_ALWAYS, *varying))
    found = _slice(rows, dimensions, cards)
    together = SliceTable(dimensions, found[:MAX_SLICES], max(len(found) - MAX_SLICES, 0))
    alone: list[Slice] = []
    n_hidden = 0
    # With few answers every combination is one answer; each dimension alone still says something.
    for name in varying if len(varying) > 1 else ():
        found = _slice(rows, (name,), cards)
        alone += [replace(one, values=(name.replace("_", " "), *one.values)) for one in found[:MAX_VALUES]]
        n_hidden += max(len(found) - MAX_VALUES, 0)
    highest = max((one.share.high or 0.0 for one in (*alone, *together.slices)), default=1.0)
    return Where(
        alone=SliceTable(("dimension", "value"), tuple(alone), n_hidden),
        together=together,
        overall=_overall(rows),
        axis=next(end for end in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0) if highest <= end),
        small_below=SMALL_ANSWERS,
    )


def _slice(rows: list[Row], dimensions: tuple[str, ...], cards: tuple[Card, ...]) -> tuple[Slice, ...]:
    """Group summary rows, most flagged answers beyond the overall rate first; by rate tiny ones would win."""
    answers: Counter[Key] = Counter()
    flagged: Counter[Key] = Counter()
    for row in rows:
        # Labelled first, so that a slice finds its cards; two values of which only the cut-off ends differ
        # would be one.
        key = tuple(label(row[name]) for name in dimensions)
        answers[key] += row["n_responses"]
        flagged[key] += row["n_flagged_responses"]
    overall = _overall(rows)
    excess = {key: flagged[key] - overall * answers[key] for key in answers}
    worst: dict[Key, str] = {}
    for card in cards:
        if card.flagged:
            worst.setdefault(tuple(dict(card.dimensions)[name] for name in dimensions), card.anchor)
    return tuple(
        Slice(
            values=key,
            share=_share(flagged[key], answers[key]),
            excess=excess[key],
            small=answers[key] < SMALL_ANSWERS,
            card=worst.get(key),
        )
        for key in sorted(
            answers, key=lambda key: (-round(excess[key], 9), -answers[key], [v or "" for v in key])
        )
    )


def _overall(rows: list[Row]) -> float:
    return sum(row["n_flagged_responses"] for row in rows) / max(sum(row["n_responses"] for row in rows), 1)


def _rejects(storage: Storage, out: str, run: Run) -> tuple[RejectRow, ...]:
    units = {file.get("url"): "byte" if file.get("format") == "jsonl" else "row" for file in run.files}
    shown: list[RejectRow] = []
    columns = ["response_id", "path", "position", "reason", "detail"]
    for _, part in read_rows(storage, out, "measurements/rejects", columns):
        for row in part.slice(0, MAX_REJECTS - len(shown)).to_pylist():
            unit = units.get(row["path"], "position")
            shown.append(
                RejectRow(
                    reason=row["reason"],
                    path=label(mask(row["path"])) or "",
                    position="" if row["position"] is None else f"{unit} {row['position']:,}",
                    response_id=label(row["response_id"]),
                    detail=label(row["detail"]) or "",
                )
            )
        if len(shown) == MAX_REJECTS:
            break
    return tuple(shown)
