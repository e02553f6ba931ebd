"""The tables that a run writes: one explicit Arrow schema each, never inferred from rows.

`measurements/*` and `texts` may nest (`judge` and the page alone read them). `findings/*` and `summary` are
flat, because dashboards choke on nested Parquet. Scores point one way: higher = less grounded. Positions are
code points.
"""

from collections.abc import Collection

import pyarrow as pa
import pyarrow.compute as pc

DIMENSIONS = ("app", "model", "retriever", "prompt_version", "language")
"""What a summary row is grouped by, beside the date."""

READINGS = ("absent_pairs", "attention_share")
"""Two of the FEATURES, in [0, 1]; runs from before they were measured have no such columns.

absent_pairs = share of tokens of which no run of two words stands in a passage; attention_share = attention
on the passages over that on passages and answer (null where the scorer's attention cannot be read).
"""

FEATURES = ("gap", "jsd_none", "max_drop", "max_jsd", "surprisal", "entropy", *READINGS)
"""Measured numbers per sentence and per response, means over tokens, in nats but for READINGS.

gap = log p(all passages) - log p(none); jsd_none = divergence of the two distributions; max_drop, max_jsd =
the largest over the removed pieces (null with `--loo off`); surprisal = -log p(all passages); entropy.
"""

VERDICT = ("ensemble", "ensemble_states", "ensemble_attention", "ensemble_likelihood")
"""What the head of a bundle says of a sentence (null without one): the probability that it rests on nothing,
and what each group of signals adds to the log-odds of that, relative to an average sentence.

An answer has `ensemble` alone: the head's rule over its sentences.
"""

_IDS = [
    pa.field("run_id", pa.string(), nullable=False),
    pa.field("date", pa.string(), nullable=False),  # YYYY-MM-DD, UTC
    pa.field("response_id", pa.string()),
    pa.field("trace_id", pa.string()),
    pa.field("span_id", pa.string()),
    *[pa.field(name, pa.string()) for name in DIMENSIONS],
]
_MEASURED = [pa.field(name, pa.float32()) for name in FEATURES] + [
    pa.field("drops", pa.list_(pa.float32())),  # one per removed piece; null = not in this sentence's window
    pa.field("jsds", pa.list_(pa.float32())),
]
_WHERE = [
    pa.field("path", pa.string(), nullable=False),
    # Row number in Parquet, CSV and JSON; byte offset of the (decompressed) line in JSONL.
    pa.field("position", pa.int64()),
]

PASSAGE = pa.struct(
    [
        pa.field("id", pa.string()),
        pa.field("text", pa.string()),
        pa.field("source", pa.string()),
        pa.field("score", pa.float64()),
    ]
)

MEASURED_RESPONSES = pa.schema(
    [
        *_IDS,
        *_WHERE,
        pa.field("record_index", pa.int32(), nullable=False),  # joins sentences to responses within a unit
        pa.field("question", pa.string()),  # question, answer, passages are null without --store-text full
        pa.field("answer", pa.string()),
        pa.field("passages", pa.list_(PASSAGE)),
        *_MEASURED,
        pa.field("ensemble", pa.float32()),
        pa.field("n_passages", pa.int32(), nullable=False),
        pa.field("n_sentences", pa.int32(), nullable=False),
        pa.field("n_context_tokens", pa.int32(), nullable=False),
        pa.field("n_answer_tokens", pa.int32(), nullable=False),
        pa.field("n_computed_tokens", pa.int64(), nullable=False),
        pa.field("n_windows", pa.int32(), nullable=False),
        pa.field("truncated", pa.bool_(), nullable=False),
    ]
)

MEASURED_SENTENCES = pa.schema(
    [
        pa.field("record_index", pa.int32(), nullable=False),
        pa.field("sentence_index", pa.int32(), nullable=False),
        pa.field("start", pa.int32(), nullable=False),
        pa.field("end", pa.int32(), nullable=False),
        pa.field("n_tokens", pa.int32(), nullable=False),
        pa.field("n_windows", pa.int32(), nullable=False),
        pa.field("truncated", pa.bool_(), nullable=False),
        *_MEASURED,
        *[pa.field(name, pa.float32()) for name in VERDICT],
        # The piece whose removal costs the sentence most: passage and code points in it.
        pa.field("evidence_passage_index", pa.int32()),
        pa.field("evidence_passage_id", pa.string()),
        pa.field("evidence_start", pa.int32()),
        pa.field("evidence_end", pa.int32()),
    ]
)

FLAGGED_TEXTS = pa.schema(
    [
        pa.field("run_id", pa.string(), nullable=False),
        pa.field("date", pa.string(), nullable=False),
        pa.field("response_id", pa.string()),
        pa.field("n_sentences", pa.int32(), nullable=False),
        pa.field("n_answer_tokens", pa.int32(), nullable=False),
        pa.field("n_context_tokens", pa.int32(), nullable=False),
        pa.field("question", pa.string()),
        pa.field("answer", pa.string()),
        pa.field("passages", pa.list_(PASSAGE)),
        pa.field("withheld", pa.string()),  # why there is no text
    ]
)
"""Table `texts`, with --store-text flagged: a row per answer with a flagged sentence."""

REJECTS = pa.schema(
    [
        *_IDS,
        *_WHERE,
        pa.field("reason", pa.string(), nullable=False),  # a detector.errors.RejectReason
        pa.field("detail", pa.string(), nullable=False),
    ]
)


def findings_sentences(methods: tuple[str, ...]) -> pa.Schema:
    """Schema of findings/sentences for a run with these methods: one `score_<method>` column each, and with
    `ensemble` what its groups of signals add to the log-odds.
    """
    contributions = VERDICT[1:] if "ensemble" in methods else ()
    return pa.schema(
        [
            *_IDS,
            pa.field("sentence_index", pa.int32(), nullable=False),
            pa.field("start", pa.int32(), nullable=False),
            pa.field("end", pa.int32(), nullable=False),
            pa.field("text", pa.string()),
            pa.field("n_tokens", pa.int32(), nullable=False),
            pa.field("truncated", pa.bool_(), nullable=False),
            pa.field("n_windows", pa.int32(), nullable=False),
            *[pa.field(f"score_{method}", pa.float64()) for method in methods],
            *[pa.field(name, pa.float32()) for name in contributions],
            pa.field("score", pa.float64(), nullable=False),
            pa.field("threshold", pa.float64(), nullable=False),
            pa.field("flagged", pa.bool_(), nullable=False),
            pa.field("evidence_passage_id", pa.string()),
            pa.field("evidence_passage_index", pa.int32()),
            pa.field("evidence_drop_nats", pa.float32()),
            pa.field("evidence_text", pa.string()),
            # OpenInference annotation words: a write-back to a tracing system is a column rename.
            pa.field("name", pa.string(), nullable=False),
            pa.field("label", pa.string(), nullable=False),
            pa.field("explanation", pa.string(), nullable=False),
            pa.field("annotator_kind", pa.string(), nullable=False),
        ]
    )


FINDINGS_RESPONSES = pa.schema(
    [
        *_IDS,
        pa.field("n_sentences", pa.int32(), nullable=False),
        pa.field("n_flagged", pa.int32(), nullable=False),
        pa.field("score_max", pa.float64()),
        pa.field("score_mean", pa.float64()),
        pa.field("worst_sentence_index", pa.int32()),
        pa.field("worst_passage_id", pa.string()),
        pa.field("flagged", pa.bool_(), nullable=False),
        pa.field("n_passages", pa.int32(), nullable=False),
        pa.field("n_context_tokens", pa.int32(), nullable=False),
        pa.field("n_answer_tokens", pa.int32(), nullable=False),
        pa.field("truncated", pa.bool_(), nullable=False),
        pa.field("n_windows", pa.int32(), nullable=False),
    ]
)

REASONS = (
    "malformed_row",
    "missing_answer",
    "missing_question",
    "no_passages",
    "passage_text_missing",
    "answer_too_short",
    "duplicate",
    "over_window",
    "scoring_failed",
)
"""The reject reasons in the order of their summary columns (a test holds them to RejectReason)."""

SUMMARY = pa.schema(
    [
        pa.field("run_id", pa.string(), nullable=False),
        pa.field("date", pa.string(), nullable=False),
        *[pa.field(name, pa.string()) for name in DIMENSIONS],
        *[
            pa.field(name, pa.int64(), nullable=False)
            for name in (
                "n_read",
                "n_audited",
                "n_rejected",
                *[f"n_{reason}" for reason in REASONS],
                "n_responses",
                "n_flagged_responses",
                "n_sentences",
                "n_flagged_sentences",
                "n_no_evidence",
                "n_truncated",
            )
        ],
        pa.field("sum_score", pa.float64(), nullable=False),
        pa.field("sum_score_sq", pa.float64(), nullable=False),
        pa.field("n_context_tokens", pa.int64(), nullable=False),
        pa.field("n_answer_tokens", pa.int64(), nullable=False),
        pa.field("flagged_rate", pa.float64()),  # null where nothing was audited
        pa.field("ci_low", pa.float64()),
        pa.field("ci_high", pa.float64()),
    ]
)


def only_records(table: pa.Table, record_indices: Collection[int]) -> pa.Table:
    """The rows of these records."""
    return table.filter(pc.is_in(table["record_index"], pa.array(list(record_indices), pa.int32())))


def without_records(table: pa.Table, record_indices: Collection[int]) -> pa.Table:
    """All rows but those of these records."""
    if not record_indices:
        return table
    return table.filter(
        pc.invert(pc.is_in(table["record_index"], pa.array(list(record_indices), pa.int32())))
    )
