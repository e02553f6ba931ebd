"""Judge a measured run: standardise, set the threshold, write findings and summary. No model is loaded, and
no bundle: the probabilities of one are among the measurements, its operating points in run.json.

Two passes over the committed units. The first reads ids and numbers: which responses were read before, and
what is average in this run. The second writes the findings. Where a flag budget sets the threshold, a pass
between the two ranks all sentences. Units are read by a few threads at once (they mostly wait for storage)
and always taken in order, and sums are exact: the result depends on the measurements alone, not on threads or
on how the logs were cut into units.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from detector.calibration import FEATURES, Reference, budget_threshold, score
from detector.methods import METHODS
from jobs.commit import MEASUREMENTS, SUCCESS, Marker, Run
from jobs.config import FLAG_BUDGET, Config
from jobs.errors import JobError
from jobs.findings import Place, duplicate_rejects, response_findings, response_rows, sentence_findings
from jobs.parts import Part, delete_stale, put_table, read_part
from jobs.redaction import Redact, load_redaction
from jobs.storage import Storage, join
from jobs.summary import Tally, totals, write_summary
from jobs.survey import THREADS, Survey, in_order, take_survey
from jobs.tables import (
    MEASURED_RESPONSES,
    MEASURED_SENTENCES,
    READINGS,
    REJECTS,
    VERDICT,
    only_records,
    without_records,
)
from jobs.texts import Texts, read_texts, text_rows, with_texts
from jobs.threshold import check_features, check_origin, operating_point, resolve, threshold_of

_SCHEMAS = {"responses": MEASURED_RESPONSES, "sentences": MEASURED_SENTENCES, "rejects": REJECTS}
_FINDINGS = r"findings/(?:sentences|responses)/date=\d{4}-\d\d-\d\d/[^/]+-[0-9a-f]{12}\.parquet"
_TEXTS = r"texts/date=\d{4}-\d\d-\d\d/[^/]+-[0-9a-f]{12}\.parquet"
_DUPLICATES = MEASUREMENTS + r"/rejects/date=\d{4}-\d\d-\d\d/duplicates-[^/]+-[0-9a-f]{12}\.parquet"


@dataclass(frozen=True, slots=True)
class JudgeTotals:
    """What a judgement came to."""

    counts: dict[str, Any]
    """The summary's counts over the whole run and the rate with its interval (`summary.totals`)."""
    reference: Reference
    """The statistics and the threshold that were applied, as in OUT/profile.json."""
    parts: tuple[Part, ...]
    """What was written: findings, and the rejects for duplicates."""


def judge(
    out: str,
    storage: Storage,
    config: Config,
    run: Run,
    units: Iterable[Marker],
    reference: Reference | None = None,
) -> JudgeTotals:
    """Write findings, summary, profile.json and the rejects for duplicates of these committed units.

    Scores are standardised with `reference` where one is given, else with the run's own statistics; the
    probabilities of a bundle are taken as they are. The threshold is the reference's when it belongs to the
    deciding method, else the bundle's operating point where its probability decides and no flag budget is
    set, else the flag budget over this run's sentences. With `store_text: flagged` the logs of the flagged
    answers are read again. What an earlier judgement left is deleted after the new findings are there;
    `_SUCCESS` goes first and is the caller's to write again. Memory: one unit per thread, and eight bytes per
    sentence where a flag budget sets the threshold. Ids lie in the system's temporary folder meanwhile, 36
    bytes per response.

    Raises ProfileError for a reference of another scorer, bundle, prompt profile or leave-one-out mode, and
    for an operating point that was not measured; ConfigError for a method that reads what was not measured;
    JobError for parts that do not hold what their marker says.
    """
    units = sorted(units, key=lambda unit: unit["unit_id"])
    config = resolve(config, run)
    deciding = config.judge.deciding_method
    redact = load_redaction(config.redact if config.store_text == "flagged" else None)
    if reference is not None:
        check_origin(reference, run)
    for unit in units:
        _check_counts(unit)
    given = reference is not None and threshold_of(reference, deciding) is not None
    point = None if given else operating_point(config, run.scorer)
    with ThreadPoolExecutor(THREADS) as pool:
        survey = take_survey(pool, partial(_read_numbers, out, storage, run), units)

        def scores(number: int, standardised: Reference) -> NDArray[np.float64]:
            sentences = _read_sentence_numbers(out, storage, run, units[number])
            return _score(without_records(sentences, survey.duplicates.of(number)), deciding, standardised)

        def ranked(standardised: Reference) -> NDArray[np.float64]:
            found = in_order(pool, partial(scores, standardised=standardised), range(len(units)))
            return np.concatenate(list(found))

        applied = _settle(config, run, survey, reference, point, ranked)

        def judge_unit(number: int) -> tuple[list[Part], Tally]:
            first = survey.duplicates.of(number)
            return _judge_unit(out, storage, config, run, applied, first, redact, units[number])

        storage.delete(join(out, SUCCESS))
        parts: list[Part] = []
        tally = Tally()
        for written, counted in in_order(pool, judge_unit, range(len(units))):
            parts += written
            tally.merge(counted)
    kept = {part["url_suffix"] for part in parts}
    delete_stale(storage, out, "findings", _FINDINGS, kept)
    delete_stale(storage, out, "texts", _TEXTS, kept)
    delete_stale(storage, out, f"{MEASUREMENTS}/rejects", _DUPLICATES, kept)
    summary = tally.table(run.run_id)
    write_summary(out, storage, summary)
    storage.write(join(out, "profile.json"), applied.to_json().encode())
    return JudgeTotals(totals(summary), applied, tuple(parts))


def _settle(
    config: Config,
    run: Run,
    survey: Survey,
    reference: Reference | None,
    point: tuple[float, float] | None,
    ranked: Callable[[Reference], NDArray[np.float64]],
) -> Reference:
    """The reference to apply: the given one or the run's own, with a threshold for the deciding method.

    `point`: the operating point that sets it, where one does. `ranked`: the deciding scores of all sentences
    by a reference, for a flag budget.
    """
    deciding, bundle = config.judge.deciding_method, run.scorer.get("bundle", {}).get("digest")
    if reference is None:
        reference = Reference(
            statistics_from=run.run_id,
            scorer=run.scorer["name"],
            scorer_fingerprint=run.scorer["fingerprint"],
            profile=run.measured_by["profile"],
            loo=run.measured_by["loo"],
            n_sentences=survey.n_sentences,
            n_responses=survey.n_responses,
            sentences=survey.scales("sentences"),
            responses=survey.scales("responses"),
            deciding_method=deciding,
        )
    if survey.n_sentences:
        check_features(config, run, reference)
    if threshold_of(reference, deciding) is not None:
        return reference
    reference = replace(
        reference, deciding_method=deciding, bundle=bundle if METHODS[deciding].trained else None
    )
    if point is not None:
        rate, threshold = point
        return replace(
            reference,
            threshold=threshold,
            threshold_from=f"bundle {bundle}",
            target_fpr=rate,
            flag_budget=None,
        )
    budget = FLAG_BUDGET if config.judge.flag_budget is None else config.judge.flag_budget
    threshold = budget_threshold(ranked(reference), budget) if survey.n_sentences else None
    return replace(
        reference,
        threshold=threshold,
        threshold_from=None if threshold is None else run.run_id,
        target_fpr=None,
        flag_budget=budget,
    )


def _judge_unit(
    out: str,
    storage: Storage,
    config: Config,
    run: Run,
    applied: Reference,
    first: Mapping[int, Place],
    redact: Redact | None,
    unit: Marker,
) -> tuple[list[Part], Tally]:
    parts: list[Part] = []
    tally = Tally()
    threshold = math.inf if applied.threshold is None else applied.threshold  # None: no sentence in the run
    texts: Texts = {}
    if config.store_text == "flagged":
        numbers = (without_records(table, first) for table in _read_numbers(out, storage, run, unit))
        flagged = _flagged(*numbers, config.judge.deciding_method, applied, threshold)
        texts = read_texts(unit, flagged, storage, config, redact)
    for date in sorted({part["date"] for part in unit["parts"]}):
        measured = _read(out, storage, run, unit, "responses", date=date).sort_by("record_index")
        responses = (
            with_texts(without_records(measured, first), texts) if texts else without_records(measured, first)
        )
        again = duplicate_rejects(only_records(measured, first), first)
        sentences = without_records(_read(out, storage, run, unit, "sentences", date=date), first)
        sentences = _with_log_tokens(sentences)
        sentences = sentences.sort_by([("record_index", "ascending"), ("sentence_index", "ascending")])
        rejects = pa.concat_tables([_read(out, storage, run, unit, "rejects", date=date), again])

        found = sentence_findings(
            responses,
            sentences,
            {method: _score(sentences, method, applied) for method in config.methods},
            deciding=applied.deciding_method,
            threshold=threshold,
            floor_nats=config.judge.evidence_floor_nats,
        )
        answers = response_findings(responses, found, response_rows(responses, sentences))
        for kind, stem, table in (
            # Named after the unit too: one file listed twice makes equal parts, and each must count.
            (f"{MEASUREMENTS}/rejects", f"duplicates-{unit['unit_id']}", again),
            ("findings/sentences", unit["unit_id"], found),
            ("findings/responses", unit["unit_id"], answers),
            ("texts", unit["unit_id"], text_rows(responses, texts)),
        ):
            if table.num_rows:
                parts.append(put_table(storage, out, kind, date, stem, table))
        tally.add(answers, found, rejects)
    return parts, tally


def _flagged(
    responses: pa.Table, sentences: pa.Table, deciding: str, applied: Reference, threshold: float
) -> pa.Table:
    flags = pa.array(_score(sentences, deciding, applied) >= threshold)
    return only_records(responses, set(sentences["record_index"].filter(flags).to_pylist()))


def _score(sentences: pa.Table, method: str, reference: Reference) -> NDArray[np.float64]:
    if not sentences.num_rows:
        return np.zeros(0)  # a run without any sentence has no statistics either
    features = {}
    if METHODS[method].trained:
        return score(_probabilities(sentences), METHODS[method], reference.sentences)
    for name in METHODS[method].features:
        # A reading that one sentence lacks tells nothing either way: it counts as average.
        column = sentences[name].cast(pa.float64()).fill_null(reference.sentences[name].mean)
        features[name] = column.to_numpy()
    return score(features, METHODS[method], reference.sentences)


def _probabilities(sentences: pa.Table) -> dict[str, NDArray[np.float64]]:
    column = sentences["ensemble"].cast(pa.float64())
    found = column.to_numpy()
    if column.null_count or not ((found >= 0) & (found <= 1)).all():
        raise JobError(
            "measured sentences without a probability of the run's bundle; audit again with another --out"
        )
    return {"ensemble": found}


def _read_numbers(out: str, storage: Storage, run: Run, unit: Marker) -> tuple[pa.Table, pa.Table]:
    measured = set(FEATURES) | {"ensemble"}
    places = {"record_index", "response_id", "path", "position"}
    responses = _read(out, storage, run, unit, "responses", columns=places | measured | {"n_answer_tokens"})
    responses = responses.append_column("n_tokens", responses["n_answer_tokens"])
    responses = responses.sort_by([(name, "ascending") for name in ("path", "position", "record_index")])
    return _with_log_tokens(responses), _read_sentence_numbers(out, storage, run, unit)


def _read_sentence_numbers(out: str, storage: Storage, run: Run, unit: Marker) -> pa.Table:
    names = {"record_index", *FEATURES, "ensemble"}
    return _with_log_tokens(_read(out, storage, run, unit, "sentences", columns=names))


def _with_log_tokens(table: pa.Table) -> pa.Table:
    """The form in which `blend` adds the length; the tables store the length itself."""
    return table.append_column("log_tokens", pa.array(np.log(table["n_tokens"].to_numpy()), pa.float64()))


def _read(
    out: str,
    storage: Storage,
    run: Run,
    unit: Marker,
    table: str,
    date: str | None = None,
    columns: Collection[str] | None = None,
) -> pa.Table:
    """The rows of one table of a unit, of all dates or of one.

    Without the columns of a bundle where the run has none, and without READINGS where the run does not know
    of them: it may be from before they existed.
    """
    left_out = set() if run.scorer.get("bundle") else set(VERDICT)
    left_out |= set() if "reads_attention" in run.scorer else set(READINGS)
    wanted_names = set(_SCHEMAS[table].names) if columns is None else set(columns)
    schema = pa.schema([field for field in _SCHEMAS[table] if field.name in wanted_names - left_out])
    wanted = [p for p in unit["parts"] if p["table"] == table and date in (None, p["date"])]
    return pa.concat_tables([schema.empty_table(), *(read_part(storage, out, p, schema) for p in wanted)])


def _check_counts(unit: Marker) -> None:
    rows = Counter({"responses": 0, "rejects": 0})
    for part in unit["parts"]:
        rows[part["table"]] += part["rows"]
    told = [unit["n_audited"], unit["n_rejected"], unit["n_read"]]
    if told != [rows["responses"], rows["rejects"], rows["responses"] + rows["rejects"]]:
        raise JobError(
            f"unit {unit['unit_id']}: its marker says audited, rejected, read = {told}, "
            f"its parts hold {rows['responses']} and {rows['rejects']}; "
            f"delete OUT/units/{unit['unit_id']}.json and run the audit again"
        )
