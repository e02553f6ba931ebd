import hashlib
import json
from dataclasses import replace
from itertools import chain

import numpy as np
import pyarrow.parquet as pq
import pytest

from detector.calibration import Scale
from detector.errors import ProfileError
from detector.methods import METHODS
from jobs.config import Config
from jobs.errors import ConfigError, JobError
from jobs.judge import judge
from jobs.parts import encode
from jobs.storage import Storage, join
from jobs.summary import recount
from jobs.tables import FINDINGS_RESPONSES, READINGS, SUMMARY, VERDICT, findings_sentences
from jobs.threshold import load_reference
from tests.jobs.measured import (
    BUNDLE,
    JUDGED_RUN,
    RUN,
    SCORER,
    answer,
    config,
    put_unit,
    random_answers,
    verdicts,
)

STORAGE = Storage()
FREE = tuple(name for name in METHODS if not METHODS[name].trained)
BEFORE_THE_BLEND = ("gap", "jsd_none", "max_drop", "max_jsd", "surprisal", "entropy", "n_tokens")


@pytest.fixture
def out(tmp_path):
    return str(tmp_path / "out")


def read(out, kind):
    """All rows of a table under OUT, as the sorted list of files gives them."""
    files = sorted(found.url for found in STORAGE.list(join(out, kind)) if found.url.endswith(".parquet"))
    return list(chain.from_iterable(pq.ParquetFile(file).read().to_pylist() for file in files))


def files(out, kind=""):
    return {found.url: STORAGE.read(found.url) for found in STORAGE.list(join(out, kind))}


def by_sentence(rows):
    return sorted(rows, key=lambda row: (row["response_id"], row["sentence_index"]))


def reference_scores(answers, method):
    """Slow and obvious: every sentence's score from the features of all sentences."""
    every = [sentence for item in answers for sentence in item["sentences"]]
    every = [sentence | {"log_tokens": np.log(sentence["n_tokens"])} for sentence in every]
    scores = []
    for sentence in every:
        total = 0.0
        for name, sign in METHODS[method].features.items():
            column = np.array([float(s[name]) for s in every])
            total += sign * (float(sentence[name]) - column.mean()) / column.std(ddof=1)
        scores.append(total)
    return scores


class TestFindings:
    def test_scores_and_flags_equal_a_slow_reference(self, out):
        answers = random_answers(40)
        units = [put_unit(STORAGE, out, "u1", answers[:25]), put_unit(STORAGE, out, "u2", answers[25:])]
        result = judge(out, STORAGE, config(flag_budget=0.2), RUN, units)
        rows = by_sentence(read(out, "findings/sentences"))
        names = [(a["ids"]["response_id"], i) for a in answers for i in range(len(a["sentences"]))]
        assert [(row["response_id"], row["sentence_index"]) for row in rows] == sorted(names)
        for method in FREE:
            expected = dict(zip(names, reference_scores(answers, method), strict=True))
            got = {(row["response_id"], row["sentence_index"]): row[f"score_{method}"] for row in rows}
            assert got == pytest.approx(expected, rel=1e-9, abs=1e-9)
        assert [row["score"] for row in rows] == [row["score_blend"] for row in rows]
        flagged = [row for row in rows if row["flagged"]]
        assert len(flagged) == int(0.2 * len(rows))
        assert min(row["score"] for row in flagged) > max(row["score"] for row in rows if not row["flagged"])
        assert {row["threshold"] for row in rows} == {result.reference.threshold}

    def test_tables_have_the_agreed_schemas_and_are_partitioned_by_date(self, out, tmp_path):
        judge(out, STORAGE, config(), RUN, [put_unit(STORAGE, out, "u1", random_answers(9))])
        for kind, schema in (
            ("findings/sentences", findings_sentences(FREE)),
            ("findings/responses", FINDINGS_RESPONSES),
            ("summary", SUMMARY),
        ):
            found = sorted((tmp_path / "out" / kind).glob("*/*.parquet"))
            assert [file.parent.name for file in found] == ["date=2026-01-01", "date=2026-01-02"]
            for file in found:
                table = pq.ParquetFile(file).read()
                assert table.schema == schema
                assert set(table["date"].to_pylist()) == {file.parent.name.removeprefix("date=")}
                table.validate(full=True)

    def test_the_way_rows_are_cut_into_units_does_not_change_a_bit(self, tmp_path):
        answers = random_answers(20, seed=3)
        judged = []
        for size in (20, 7, 1):
            out = str(tmp_path / f"by-{size}")
            units = [
                put_unit(STORAGE, out, f"u{start:03}", answers[start : start + size])
                for start in range(0, len(answers), size)
            ]
            result = judge(out, STORAGE, config(), RUN, reversed(units))
            judged.append(
                (
                    by_sentence(read(out, "findings/sentences")),
                    sorted(read(out, "findings/responses"), key=lambda row: row["response_id"]),
                    read(out, "summary"),
                    result.reference,
                )
            )
        assert judged[0] == judged[1] == judged[2]

    def test_the_order_of_rows_in_a_part_does_not_matter(self, tmp_path):
        judged = []
        for backwards in (False, True):
            out = str(tmp_path / str(backwards))
            unit = put_unit(STORAGE, out, "u1", random_answers(30), backwards=backwards)
            judge(out, STORAGE, config(), RUN, [unit])
            judged.append({url.removeprefix(out): data for url, data in files(out, "findings").items()})
        assert judged[0] == judged[1]

    def test_judging_again_gives_the_same_bytes(self, out):
        units = [put_unit(STORAGE, out, f"u{n}", random_answers(8, seed=n)) for n in range(3)]
        judge(out, STORAGE, config(), RUN, units)
        before = files(out)
        judge(out, STORAGE, config(), RUN, units)
        assert files(out) == before

    def test_another_budget_replaces_the_findings_and_leaves_foreign_files(self, out):
        units = [put_unit(STORAGE, out, "u1", random_answers(30))]
        judge(out, STORAGE, config(flag_budget=0.1), RUN, units)
        before = files(out, "findings")
        STORAGE.write(join(out, "findings", "notes.md"), b"mine")
        STORAGE.write(join(out, "_SUCCESS"), b"{}")
        judge(out, STORAGE, config(flag_budget=0.5), RUN, units)
        after = files(out, "findings")
        assert after.pop(join(out, "findings", "notes.md")) == b"mine"
        assert len(after) == len(before)
        assert not set(after) & set(before)
        rows = read(out, "findings/sentences")
        assert sum(row["flagged"] for row in rows) == len(rows) // 2
        assert not STORAGE.exists(join(out, "_SUCCESS"))

    def test_nothing_is_deleted_before_the_new_findings_are_there(self, out):
        units = [put_unit(STORAGE, out, "u1", random_answers(30))]
        judge(out, STORAGE, config(flag_budget=0.1), RUN, units)
        before = files(out, "findings")

        class FailsLate(Storage):
            def write(self, url, data):
                if "findings/responses" in url:
                    raise OSError("no space left")
                Storage.write(self, url, data)

        with pytest.raises(OSError, match="no space left"):
            judge(out, FailsLate(), config(flag_budget=0.5), RUN, units)
        assert before.items() <= files(out, "findings").items()

    def test_fewer_methods_give_fewer_columns(self, out):
        settings = Config(methods=("gap",), judge={"deciding_method": "gap"})
        judge(out, STORAGE, settings, RUN, [put_unit(STORAGE, out, "u1", random_answers(5))])
        rows = read(out, "findings/sentences")
        assert [name for name in rows[0] if name.startswith("score")] == ["score_gap", "score"]

    def test_with_leave_one_out_off_there_are_scores_but_no_evidence(self, out):
        lacking = {"max_drop": None, "max_jsd": None, "evidence": None}
        unit = put_unit(STORAGE, out, "u1", [answer("a", [{"gap": g} | lacking for g in (0.1, 0.9)])])
        settings = Config(methods=("gap", "jsd_none"), loo="off", judge={"deciding_method": "gap"})
        run = replace(RUN, measured_by={"profile": "plain", "loo": "off"})
        result = judge(out, STORAGE, settings, run, [unit])
        assert result.counts["n_no_evidence"] == 2
        assert not {"max_drop", "max_jsd"} & set(result.reference.sentences)
        with pytest.raises(ConfigError, match=r"gasp reads max_drop.*loo off"):
            judge(out, STORAGE, Config(loo="exact", judge={"deciding_method": "gasp"}), run, [unit])
        blended = judge(out, STORAGE, Config(), run, [unit])
        assert blended.reference.deciding_method == "blend"

    def test_a_sentence_that_lacks_one_reading_counts_as_average_in_it(self, out):
        sentences = [{"max_drop": d, "gap": 1.0} for d in (0.0, 1.0, None)]
        settings = config(deciding_method="gasp")
        judge(out, STORAGE, settings, RUN, [put_unit(STORAGE, out, "u1", [answer("a", sentences)])])
        low, high, lacking = (row["score"] for row in by_sentence(read(out, "findings/sentences")))
        assert lacking == pytest.approx((low + high) / 2)

    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    def test_a_measured_number_that_is_not_finite_stops_the_judgement(self, out, value):
        unit = put_unit(STORAGE, out, "u1", [answer("a", [{"gap": value}, {}])])
        with pytest.raises(JobError, match=r"unit u1: a measured gap is not finite"):
            judge(out, STORAGE, config(), RUN, [unit])


class TestDuplicates:
    def units(self, out):
        first = put_unit(
            STORAGE,
            out,
            "u1",
            [answer("a", [{"gap": 1.0}], position=5), answer("b", [{}])],
            path="logs/1.jsonl",
        )
        # Out of order in the part, and on another date: "c" at position 10 comes before "c" at position 20.
        again = [
            answer("c", [{"gap": 9.0}, {"gap": 9.0}], position=20, app="bank"),
            answer("c", [{"gap": 3.0}], position=10, date="2026-01-02"),
            answer("a", [{"gap": 9.0}], position=30),
            answer(None, [{}], position=40),
            answer(None, [{}], position=50),
        ]
        return [
            first,
            put_unit(STORAGE, out, "u2", again, [("2026-01-01", "no_passages")], path="logs/2.jsonl"),
        ]

    def test_the_first_one_counts_and_the_later_one_is_a_reject_that_names_it(self, out):
        units = self.units(out)
        result = judge(out, STORAGE, config(), RUN, reversed(units))  # in the order of their ids all the same
        found = [(row["response_id"], row["date"]) for row in read(out, "findings/responses")]
        ids = [(None, "2026-01-01")] * 2 + [("a", "2026-01-01"), ("b", "2026-01-01"), ("c", "2026-01-02")]
        assert sorted(found, key=str) == sorted(ids, key=str)
        later = {
            row["position"]: row for row in read(out, "measurements/rejects") if row["reason"] == "duplicate"
        }
        assert later[20]["detail"] == "the same response_id was read before: logs/2.jsonl, position 10"
        assert later[30]["detail"] == "the same response_id was read before: logs/1.jsonl, position 5"
        assert (later[20]["path"], later[20]["app"]) == ("logs/2.jsonl", "bank")
        assert set(later) == {20, 30}
        assert result.counts["n_duplicate"] == 2
        assert result.counts["n_read"] == sum(unit["n_read"] for unit in units) == 8
        assert result.counts["n_audited"] == 5

    def test_they_stay_out_of_the_statistics(self, out):
        result = judge(out, STORAGE, config(), RUN, self.units(out))
        assert (result.reference.n_responses, result.reference.n_sentences) == (5, 5)
        assert result.reference.sentences["gap"].mean == pytest.approx((1.0 + 3.0) / 5)

    def test_units_of_a_file_that_is_listed_three_times_all_count(self, out):
        units = [put_unit(STORAGE, out, f"u{n}", random_answers(4)) for n in range(3)]
        counts = judge(out, STORAGE, config(), RUN, units).counts
        again = recount(out, STORAGE, units)
        assert again == {name: counts[name] for name in again}
        assert (again["n_audited"], again["n_rejected"]) == (4, 8)

    def test_their_reject_parts_are_kept_once_and_go_when_there_are_none(self, out):
        units = self.units(out)
        for _ in range(2):
            judge(out, STORAGE, config(), RUN, units)
            parts = [url for url in files(out, "measurements/rejects") if "/duplicates-" in url]
            assert len(parts) == 1
        judge(out, STORAGE, config(), RUN, units[:1])
        assert not [url for url in files(out, "measurements/rejects") if "/duplicates-" in url]


class TestReference:
    def test_the_profile_of_one_night_judges_the_next(self, tmp_path):
        outs = [str(tmp_path / name) for name in ("first", "second")]
        nights = [[put_unit(STORAGE, out, "u1", random_answers(40, seed=i))] for i, out in enumerate(outs)]
        first = judge(outs[0], STORAGE, config(), RUN, nights[0]).reference
        given = load_reference(join(outs[0], "profile.json"), STORAGE)
        assert given == first
        second = judge(
            outs[1], STORAGE, config(flag_budget=0.5), replace(RUN, run_id="run-2"), nights[1], given
        )
        assert second.reference == first  # a fixed threshold: the rate may move from night to night
        rows = read(outs[1], "findings/sentences")
        scale = first.sentences["gap"]
        features = [s for a in random_answers(40, seed=1) for s in a["sentences"]]
        assert sorted(row["score_gap"] for row in rows) == pytest.approx(
            sorted(-(float(s["gap"]) - scale.mean) / scale.sd for s in features)
        )
        assert {row["threshold"] for row in rows} == {first.threshold}

    def test_a_threshold_of_another_method_is_not_used(self, out):
        units = [put_unit(STORAGE, out, "u1", random_answers(40))]
        given = judge(out, STORAGE, config(), RUN, units).reference
        run = replace(RUN, run_id="run-2")
        applied = judge(
            out, STORAGE, config(deciding_method="gap", flag_budget=0.3), run, units, given
        ).reference
        assert (applied.deciding_method, applied.threshold_from) == ("gap", "run-2")
        assert (applied.statistics_from, applied.flag_budget) == ("run-1", 0.3)
        rows = read(out, "findings/sentences")
        assert sum(row["flagged"] for row in rows) == int(0.3 * len(rows))

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"scorer_fingerprint": "bad"}, "scorer fingerprint is bad, here it is f00"),
            ({"profile": "chat"}, "prompt profile is chat, here it is plain"),
            ({"loo": "off"}, "loo is off, here it is exact"),
            ({"sentences": {"gap": Scale(0, 1)}}, "no statistics of jsd_none"),
            ({"sentences": dict.fromkeys(BEFORE_THE_BLEND, Scale(0, 1))}, "no statistics of absent_pairs"),
        ],
    )
    def test_a_foreign_profile_is_refused_and_nothing_is_touched(self, out, change, message):
        units = [put_unit(STORAGE, out, "u1", random_answers(9))]
        given = judge(out, STORAGE, config(), RUN, units).reference
        STORAGE.write(join(out, "_SUCCESS"), b"{}")
        before = files(out)
        foreign = replace(given, statistics_from="run-0", **change)
        with pytest.raises(ProfileError, match=message) as raised:
            judge(out, STORAGE, config(), RUN, units, foreign)
        assert "\n" not in str(raised.value)
        assert files(out) == before

    def test_a_file_that_is_no_profile_is_named(self, out):
        STORAGE.write(join(out, "p.json"), b'{"version": 1}')
        with pytest.raises(ProfileError, match=r"profile .*/p\.json: key .* is missing"):
            load_reference(join(out, "p.json"), STORAGE)
        with pytest.raises(ProfileError, match=r"profile .*/q\.json: no such file"):
            load_reference(join(out, "q.json"), STORAGE)

    def test_the_profile_file_says_whose_statistics_and_whose_threshold(self, out):
        judge(out, STORAGE, config(flag_budget=0.25), RUN, [put_unit(STORAGE, out, "u1", random_answers(9))])
        tree = json.loads(STORAGE.read(join(out, "profile.json")))
        assert (tree["statistics_from"], tree["threshold_from"], tree["flag_budget"]) == (
            "run-1",
            "run-1",
            0.25,
        )
        assert "budget and not an error rate" in tree["note"]


class TestBundle:
    def judged(self, out, settings=None, reference=None, run=JUDGED_RUN, seed=0):
        units = [put_unit(STORAGE, out, "u1", verdicts(40, seed))]
        return judge(out, STORAGE, settings or config(), run, units, reference)

    def test_the_probability_is_the_score_and_the_operating_point_the_threshold(self, out):
        applied = self.judged(out).reference
        rows = by_sentence(read(out, "findings/sentences"))
        names = [(a["ids"]["response_id"], i) for a in verdicts(40) for i in range(len(a["sentences"]))]
        said = [float(s["ensemble"]) for a in verdicts(40) for s in a["sentences"]]
        assert {(r["response_id"], r["sentence_index"]): r["score"] for r in rows} == dict(
            zip(names, said, strict=True)
        )
        assert all(row["score"] == row["score_ensemble"] for row in rows)
        assert [row["flagged"] for row in rows] == [row["score"] >= 0.6 for row in rows]
        assert {row["threshold"] for row in rows} == {0.6}
        assert (applied.deciding_method, applied.threshold, applied.target_fpr) == ("ensemble", 0.6, 0.05)
        assert (applied.threshold_from, applied.flag_budget) == (f"bundle {BUNDLE['digest']}", None)

    def test_the_profile_file_says_that_it_is_an_operating_point(self, out):
        applied = self.judged(out).reference
        tree = json.loads(STORAGE.read(join(out, "profile.json")))
        assert "not an error rate" not in tree["note"] and "had not seen them" in tree["note"]
        assert (tree["bundle"], tree["target_fpr"]) == (BUNDLE["digest"], 0.05)
        assert load_reference(join(out, "profile.json"), STORAGE) == applied

    def test_the_other_methods_are_judged_as_ever(self, out, tmp_path):
        self.judged(out)
        without = str(tmp_path / "without")
        judge(without, STORAGE, config(), RUN, [put_unit(STORAGE, without, "u1", random_answers(40))])
        theirs = by_sentence(read(without, "findings/sentences"))
        for ours, other in zip(by_sentence(read(out, "findings/sentences")), theirs, strict=True):
            assert [ours[f"score_{name}"] for name in FREE] == [other[f"score_{name}"] for name in FREE]

    def test_another_operating_point_needs_neither_model_nor_bundle(self, out):
        for rate, threshold in BUNDLE["operating_points"]:
            applied = self.judged(out, config(target_fpr=rate)).reference
            assert (applied.target_fpr, applied.threshold) == (rate, threshold)
            rows = read(out, "findings/sentences")
            assert [row["flagged"] for row in rows] == [row["score"] >= threshold for row in rows]
        with pytest.raises(ProfileError, match=r"0\.03 was not measured.*measured: 0\.01, 0\.02"):
            self.judged(out, config(target_fpr=0.03))

    def test_a_budget_that_was_asked_for_ranks_the_probabilities_of_the_run(self, out):
        applied = self.judged(out, config(flag_budget=0.25)).reference
        rows = read(out, "findings/sentences")
        assert sum(row["flagged"] for row in rows) == int(0.25 * len(rows))
        assert (applied.target_fpr, applied.threshold_from) == (None, "run-1")
        assert "budget and not an error rate" in json.loads(STORAGE.read(join(out, "profile.json")))["note"]

    def test_another_method_decides_with_a_budget_where_it_is_named(self, out):
        applied = self.judged(out, config(deciding_method="gap")).reference
        assert (applied.flag_budget, applied.target_fpr, applied.bundle) == (0.1, None, None)
        rows = read(out, "findings/sentences")
        assert [row["score"] for row in rows] == [row["score_gap"] for row in rows]
        with pytest.raises(ConfigError, match="no false-alarm rate of gap"):
            self.judged(out, config(deciding_method="gap", target_fpr=0.05))

    def test_the_profile_of_one_night_judges_the_next_and_not_one_of_another_bundle(self, tmp_path):
        first = self.judged(str(tmp_path / "a"), config(target_fpr=0.02)).reference
        second = self.judged(str(tmp_path / "b"), None, first, replace(JUDGED_RUN, run_id="run-2"), 1)
        assert second.reference == first
        for bundle in ({"bundle": BUNDLE | {"digest": "c" * 12}}, {}):
            other = replace(JUDGED_RUN, scorer=SCORER | bundle)
            settings = config() if bundle else config(deciding_method="gasp")
            with pytest.raises(ProfileError, match="its bundle is b0b0b0b0b0b0"):
                self.judged(str(tmp_path / "c"), settings, first, other)

    def test_a_run_without_a_bundle_has_nothing_to_judge_by(self, out):
        units = [put_unit(STORAGE, out, "u1", random_answers(4))]
        with pytest.raises(ConfigError, match="ensemble needs a bundle"):
            judge(out, STORAGE, Config(methods=("ensemble",)), RUN, units)

    @pytest.mark.parametrize("value", [None, float("nan"), 1.5, -0.1])
    def test_a_sentence_without_a_probability_stops_the_judgement(self, out, value):
        unit = put_unit(STORAGE, out, "u1", [answer("a", [{"ensemble": 0.5}, {"ensemble": value}])])
        with pytest.raises(JobError, match="without a probability"):
            judge(out, STORAGE, config(), JUDGED_RUN, [unit])

    @pytest.mark.parametrize("lacks", [VERDICT, READINGS, (*VERDICT, *READINGS)], ids="-".join)
    def test_a_run_from_before_bundles_or_the_blend_is_judged_again_by_what_it_has(self, out, lacks):
        unit = put_unit(STORAGE, out, "u1", random_answers(9))
        for part in unit["parts"]:
            url = join(out, part["url_suffix"])
            table = pq.ParquetFile(url).read()
            old = table.drop_columns([name for name in lacks if name in table.column_names])
            STORAGE.write(url, encode(old))
            part["sha256"] = hashlib.sha256(STORAGE.read(url)).hexdigest()
        old_run = replace(RUN, scorer={"name": "tiny", "fingerprint": "f00"})
        result = judge(out, STORAGE, config(), old_run if READINGS[0] in lacks else RUN, [unit])
        assert result.counts["n_audited"] == 9
        assert result.reference.deciding_method == ("gasp" if READINGS[0] in lacks else "blend")
        with pytest.raises(ConfigError, match="blend reads attention"):
            judge(out, STORAGE, Config(methods=("blend",)), old_run, [unit])

    def test_a_run_without_sentences_keeps_the_operating_point(self, out):
        unit = put_unit(STORAGE, out, "u1", [answer("a", [])])
        result = judge(out, STORAGE, config(), JUDGED_RUN, [unit])
        assert (result.reference.threshold, result.counts["n_flagged_responses"]) == (0.6, 0)


class TestConservation:
    def test_the_recount_of_the_files_equals_the_totals(self, out):
        rejected = [("2026-01-01", "no_passages"), ("2026-01-03", "malformed_row")]
        answers = random_answers(30)
        units = [
            put_unit(STORAGE, out, "u1", answers[:20], rejected),
            put_unit(STORAGE, out, "u2", answers[15:]),
        ]
        counts = judge(out, STORAGE, config(), RUN, units).counts
        again = recount(out, STORAGE, units)
        assert again == {name: counts[name] for name in again}
        assert (counts["n_read"], counts["n_audited"], counts["n_duplicate"]) == (37, 30, 5)
        rows = read(out, "summary")
        assert all(row["n_read"] == row["n_audited"] + row["n_rejected"] for row in rows)
        assert {row["date"] for row in rows} == {"2026-01-01", "2026-01-02", "2026-01-03"}

    def test_a_run_of_rejects_alone_is_judged_without_a_threshold(self, out):
        unit = put_unit(STORAGE, out, "u1", [], [("2026-01-01", "no_passages")])
        result = judge(out, STORAGE, config(), RUN, [unit])
        assert (result.counts["n_read"], result.counts["flagged_rate"]) == (1, None)
        assert result.reference.threshold is None
        assert load_reference(join(out, "profile.json"), STORAGE) == result.reference
        assert files(out, "findings") == {}

    def test_answers_without_any_sentence_are_audited(self, out):
        result = judge(out, STORAGE, config(), RUN, [put_unit(STORAGE, out, "u1", [answer("a", [])])])
        assert (result.counts["n_audited"], result.counts["n_sentences"]) == (1, 0)
        assert result.reference.threshold is None
        assert [row["flagged"] for row in read(out, "findings/responses")] == [False]

    def test_no_units_at_all(self, out):
        assert judge(out, STORAGE, config(), RUN, []).counts["n_read"] == 0

    @pytest.mark.parametrize("name", ["n_audited", "n_rejected", "n_read"])
    def test_a_marker_that_does_not_add_up_is_refused(self, out, name):
        unit = put_unit(STORAGE, out, "u1", random_answers(4))
        unit[name] += 1
        with pytest.raises(JobError, match="unit u1: its marker says"):
            judge(out, STORAGE, config(), RUN, [unit])

    def test_a_damaged_part_is_refused(self, out):
        unit = put_unit(STORAGE, out, "u1", random_answers(4))
        STORAGE.write(join(out, unit["parts"][0]["url_suffix"]), b"PAR1")
        with pytest.raises(JobError, match="not the bytes that its marker names"):
            judge(out, STORAGE, config(), RUN, [unit])


@pytest.mark.s3
def test_the_same_findings_come_out_of_s3(seaweed, out):
    remote = f"{seaweed.url()}/judged"
    answers = random_answers(20)
    for place in (out, remote):
        units = [put_unit(STORAGE, place, "u1", answers), put_unit(STORAGE, place, "u2", answers[:3])]
        judge(place, STORAGE, config(flag_budget=0.4), RUN, units)
        counts = judge(place, STORAGE, config(), RUN, units).counts
        again = recount(place, STORAGE, units)
        assert again == {name: counts[name] for name in again}
    there = {url.removeprefix(remote): data for url, data in files(remote).items()}
    assert there == {url.removeprefix(out): data for url, data in files(out).items()}
