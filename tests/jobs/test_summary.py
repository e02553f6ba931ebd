import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from detector.errors import RejectReason
from jobs.errors import JobError
from jobs.parts import put_table
from jobs.storage import Storage, join
from jobs.summary import Tally, recount, totals, wilson, write_summary
from jobs.tables import FINDINGS_RESPONSES, REASONS, REJECTS, SUMMARY, findings_sentences

SENTENCES = findings_sentences(())
IDS = {"run_id": "run-1", "date": "2026-01-01", "app": "shop"}
RESPONSE = {"n_sentences": 1, "n_flagged": 0, "n_passages": 2, "n_windows": 1}
SENTENCE = {"sentence_index": 0, "start": 0, "end": 4, "n_tokens": 1, "n_windows": 1, "truncated": False}
SENTENCE |= {"threshold": 1.0, "name": "n", "label": "l", "explanation": "e", "annotator_kind": "CODE"}


def responses(*rows):
    defaults = {"flagged": False, "truncated": False, "n_context_tokens": 10, "n_answer_tokens": 3}
    return pa.Table.from_pylist([IDS | RESPONSE | defaults | row for row in rows], schema=FINDINGS_RESPONSES)


def sentences(*rows):
    defaults = {"flagged": False, "score": 0.5, "evidence_passage_index": 0}
    return pa.Table.from_pylist([IDS | SENTENCE | defaults | row for row in rows], schema=SENTENCES)


def rejects(*rows):
    where = {"path": "a.jsonl", "detail": "why"}
    return pa.Table.from_pylist([IDS | where | row for row in rows], schema=REJECTS)


def test_reasons_are_those_of_the_detector_and_each_has_a_column():
    assert set(REASONS) == {reason.value for reason in RejectReason}
    assert {f"n_{reason}" for reason in REASONS} <= set(SUMMARY.names)


class TestWilson:
    @pytest.mark.parametrize(
        ("k", "n", "low", "high"),
        [
            (0, 10, 0.0, 0.27753),
            (1, 10, 0.01788, 0.40415),
            (50, 100, 0.40383, 0.59617),
            (10, 10, 0.72247, 1.0),
        ],
    )
    def test_known_values(self, k, n, low, high):
        assert wilson(k, n) == pytest.approx((low, high), abs=1e-5)

    @given(st.integers(1, 10**7).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
    def test_holds_the_share_and_stays_within_0_and_1(self, kn):
        k, n = kn
        low, high = wilson(k, n)
        assert 0 <= low <= k / n <= high <= 1

    @given(st.integers(1, 500).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
    def test_the_bounds_solve_the_equation_that_defines_them(self, kn):
        k, n = kn
        for bound in wilson(k, n):
            if 0 < bound < 1:
                z = abs(k / n - bound) / np.sqrt(bound * (1 - bound) / n)
                assert z == pytest.approx(1.959963984540054, rel=1e-6)


class TestTally:
    def test_counts_what_was_read_flagged_and_rejected(self):
        tally = Tally()
        tally.add(
            responses({"flagged": True, "truncated": True}, {"n_context_tokens": 5}),
            sentences({"flagged": True, "score": 2.0}, {"score": -1.0, "evidence_passage_index": None}),
            rejects({"reason": "no_passages"}, {"reason": "duplicate"}, {"reason": "duplicate"}),
        )
        (row,) = tally.table("run-1").to_pylist()
        assert (row["n_read"], row["n_audited"], row["n_rejected"]) == (5, 2, 3)
        assert {r: row[f"n_{r}"] for r in REASONS if row[f"n_{r}"]} == {"no_passages": 1, "duplicate": 2}
        assert (row["n_responses"], row["n_flagged_responses"], row["n_truncated"]) == (2, 1, 1)
        assert (row["n_sentences"], row["n_flagged_sentences"], row["n_no_evidence"]) == (2, 1, 1)
        assert (row["sum_score"], row["sum_score_sq"]) == (1.0, 5.0)
        assert (row["n_context_tokens"], row["n_answer_tokens"]) == (15, 6)
        assert (row["flagged_rate"], row["ci_low"], row["ci_high"]) == (0.5, *wilson(1, 2))

    def test_a_missing_value_is_a_group_of_its_own_and_rows_are_sorted(self):
        tally = Tally()
        apps = ["shop", "", None, "bank", None]
        tally.add(responses(*({"app": app} for app in apps)), sentences(), rejects())
        rows = tally.table("run-1").to_pylist()
        assert [(row["app"], row["n_responses"]) for row in rows] == [
            (None, 2),
            ("", 1),
            ("bank", 1),
            ("shop", 1),
        ]

    def test_a_group_with_only_rejects_has_no_rate(self):
        tally = Tally()
        tally.add(responses(), sentences(), rejects({"reason": "malformed_row", "app": None}))
        (row,) = tally.table("run-1").to_pylist()
        assert (row["n_read"], row["n_audited"]) == (1, 0)
        assert (row["flagged_rate"], row["ci_low"], row["ci_high"]) == (None, None, None)

    def test_a_reason_without_a_column_is_not_lost_silently(self):
        with pytest.raises(JobError, match="'bad_luck'"):
            Tally().add(responses(), sentences(), rejects({"reason": "bad_luck"}))

    @settings(max_examples=20)
    @given(st.lists(st.floats(-1e6, 1e6), max_size=6), st.randoms(use_true_random=False))
    def test_neither_order_nor_split_changes_a_bit(self, scores, random):
        whole = Tally()
        whole.add(responses(), sentences(*({"score": score} for score in scores)), rejects())
        merged = Tally()
        for score in random.sample(scores, len(scores)):
            part = Tally()
            part.add(responses(), sentences({"score": score}), rejects())
            merged.merge(part)
        assert merged.table("run-1").equals(whole.table("run-1"))

    def test_totals_sum_the_rows_and_give_the_rate_of_the_whole(self):
        tally = Tally()
        tally.add(responses({"flagged": True}, {"app": "bank"}, {"app": "bank"}), sentences(), rejects())
        counts = totals(tally.table("run-1"))
        assert (counts["n_read"], counts["n_flagged_responses"]) == (3, 1)
        assert (counts["ci_low"], counts["flagged_rate"], counts["ci_high"]) == (
            wilson(1, 3)[0],
            1 / 3,
            wilson(1, 3)[1],
        )

    def test_totals_of_nothing_are_zero_without_a_rate(self):
        counts = totals(Tally().table("run-1"))
        assert counts["n_read"] == 0
        assert counts["flagged_rate"] is None


def test_one_file_per_date_and_dates_that_are_gone_are_deleted(tmp_path):
    out, storage = str(tmp_path), Storage()
    for dates in (["2026-01-01", "2026-01-02"], ["2026-01-02", "2026-01-03"]):
        tally = Tally()
        tally.add(responses(*({"date": date} for date in dates)), sentences(), rejects())
        write_summary(out, storage, tally.table("run-1"))
        files = sorted(tmp_path.glob("summary/*/*"))
        assert [file.parent.name for file in files] == [f"date={date}" for date in dates]
        assert {file.name for file in files} == {"summary.parquet"}
    table = pq.ParquetFile(files[0]).read()
    assert table.schema == SUMMARY
    assert table["date"].to_pylist() == ["2026-01-02"]


def test_recount_reads_the_files_and_ignores_parts_that_no_marker_names(tmp_path):
    out, storage = str(tmp_path), Storage()
    day = "2026-01-01"
    put_table(storage, out, "findings/responses", day, "u1", responses({"flagged": True}, {}))
    put_table(storage, out, "findings/sentences", day, "u1", sentences({"flagged": True}, {}, {}))
    put_table(storage, out, "findings/sentences", "2026-01-02", "u2", sentences({"flagged": True}))
    known = put_table(storage, out, "measurements/rejects", day, "u1", rejects({"reason": "no_passages"}))
    lost = {"reason": "scoring_failed"}
    put_table(storage, out, "measurements/rejects", day, "u1", rejects(lost, lost))
    put_table(storage, out, "measurements/rejects", day, "duplicates", rejects({"reason": "duplicate"}))
    storage.write(join(out, "findings", "sentences", "notes.md"), b"mine")
    assert recount(out, storage, [{"unit_id": "u1", "parts": [known]}]) == {
        "n_read": 4,
        "n_audited": 2,
        "n_rejected": 2,
        "n_responses": 2,
        "n_flagged_responses": 1,
        "n_sentences": 4,
        "n_flagged_sentences": 2,
    }


def test_recount_of_nothing_is_zero(tmp_path):
    assert set(recount(str(tmp_path / "none"), Storage(), []).values()) == {0}
