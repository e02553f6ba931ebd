"""Labelled answers: read as logs are, picked by source, measured once, labelled token by token."""

import json
from dataclasses import replace

import numpy as np
import pytest

from detector import Record, Scorer
from detector.aggregate import assign_tokens, sentence_tokens
from detector.probe import Keep
from detector.words import word_features
from jobs.config import Config
from jobs.errors import ConfigError
from jobs.labelled import LabelledRecord, label, measure_labelled, pick, read_labelled
from jobs.traces import TraceStore, trace_key
from tests.runs import row, write_rows

KEEP = Keep(leave_one_out=False)


@pytest.fixture(scope="module")
def tiny(tiny_scorer_dir):
    return Scorer.load(str(tiny_scorer_dir))


@pytest.fixture
def store(tmp_path):
    return TraceStore(tmp_path / "traces")


def labelled_row(number, *spans, **more):
    return row(number, spans=[{"start": start, "end": end} for start, end in spans], **more)


def read(folder, *rows, config=None):
    return read_labelled([write_rows(folder / "log.jsonl", list(rows))], config or Config())


def answers(number, *texts, spans=(), quality="good", source_id=None):
    """Answers to one question with the same passages."""
    passages = [passage["text"] for passage in row(number)["passages"]]
    return [
        LabelledRecord(
            Record(row(number)["question"], passages, text, response_id=f"{number}-{i}"),
            tuple(spans),
            source_id or f"s{number}",
            "",
            "",
            "",
            quality,
        )
        for i, text in enumerate(texts)
    ]


class TestReading:
    def test_a_row_becomes_a_record_and_what_people_said(self, tmp_path):
        one, two = read(
            tmp_path,
            labelled_row(
                1, (3, 9), (20, 53), source_id=14, quality="truncated", task="QA", model="m", lang="en"
            ),
            labelled_row(2),
        )
        assert one.record.answer == row(1)["answer"]
        assert [p.text for p in one.record.passages] == [p["text"] for p in row(1)["passages"]]
        assert one.record.response_id == "r1"
        assert one.spans == ((3, 9), (20, 53))
        assert (one.source_id, one.quality, one.task) == ("14", "truncated", "QA")
        assert (one.generator, one.language) == ("m", "en")
        assert two.spans == ()
        assert (two.quality, two.task, two.generator, two.language) == ("good", "", "", "")

    def test_rows_come_in_listing_order_whatever_the_units_they_are_cut_into(self, tmp_path):
        rows = [labelled_row(number, (0, number + 1)) for number in range(30)]
        for name, part in (("b", rows[10:]), ("a", rows[:10])):
            write_rows(tmp_path / f"{name}.jsonl", part)
        small = Config.model_validate({"read": {"unit_bytes": 1024}})
        for config in (Config(), small):
            found = read_labelled([str(tmp_path)], config)
            assert [one.record.response_id for one in found] == [f"r{number}" for number in range(30)]
            assert [one.spans for one in found] == [((0, number + 1),) for number in range(30)]

    def test_one_json_document_will_do_as_well(self, tmp_path):
        rows = [labelled_row(1, (0, 8)), labelled_row(2, (2, 3), (4, 5))]
        (tmp_path / "log.json").write_text(json.dumps(rows))
        found = read_labelled([str(tmp_path / "log.json")], Config())
        assert [one.spans for one in found] == [((0, 8),), ((2, 3), (4, 5))]

    def test_answers_without_a_source_share_one_by_question_and_passages(self, tmp_path):
        found = read(
            tmp_path,
            labelled_row(1),
            labelled_row(1, answer="Something else."),
            labelled_row(1, passages=["Other passages."]),
            labelled_row(1, question="Another question?"),
            labelled_row(1, source_id=0),
            labelled_row(2, source_id=0),
            labelled_row(1, source_id=""),
        )
        sources = [one.source_id for one in found]
        assert sources[0] == sources[1] == sources[6]
        assert len(set(sources[:4])) == 3
        assert sources[4] == sources[5] == "0"

    def test_what_an_audit_would_reject_is_left_out(self, tmp_path):
        found = read(
            tmp_path, labelled_row(1), row(2, passages=None), "{broken", row(3, answer=" "), labelled_row(4)
        )
        assert [one.record.response_id for one in found] == ["r1", "r4"]

    def test_logs_without_any_labelled_answer_are_refused(self, tmp_path):
        with pytest.raises(ConfigError, match=r"log\.jsonl: no labelled answer there"):
            read(tmp_path, row(1, passages=None))

    @pytest.mark.parametrize(
        "spans",
        [None, "a text", {"start": 0, "end": 1}, 7],
        ids=str,
    )
    def test_a_row_without_a_list_of_spans_is_refused_in_one_line(self, tmp_path, spans):
        rows = [labelled_row(1), row(2, spans=spans)]
        position = len(json.dumps(rows[0])) + 1
        with pytest.raises(ConfigError, match=rf"log\.jsonl, position {position}: no list of") as caught:
            read(tmp_path, *rows)
        assert "\n" not in str(caught.value)

    def test_a_plain_log_row_is_not_taken_for_an_answer_that_is_all_supported(self, tmp_path):
        with pytest.raises(ConfigError, match="empty = all supported"):
            read(tmp_path, labelled_row(1), row(2))

    @pytest.mark.parametrize(
        "span",
        [
            {"start": 3, "end": 3},
            {"start": 9, "end": 3},
            {"start": -1, "end": 3},
            {"start": 0, "end": 54},
            {"start": 0},
            {"end": 3},
            {"start": 0.0, "end": 3},
            {"start": False, "end": True},
            {"start": "0", "end": "3"},
            {"start": None, "end": 3},
            [0, 3],
            "0:3",
            None,
        ],
        ids=str,
    )
    def test_a_span_that_is_none_is_refused_in_one_line_and_shows_no_text(self, tmp_path, span):
        assert len(row(1)["answer"]) == 53
        with pytest.raises(ConfigError, match=r"position 0: a span must be .* <= 53") as caught:
            read(tmp_path, row(1, spans=[{"start": 0, "end": 53}, span]))
        assert "\n" not in str(caught.value) and "shelf" not in str(caught.value)


class TestPicking:
    def test_the_order_of_the_rows_changes_nothing(self):
        records = [one for number in range(12) for one in answers(number, "a", "b", "c", "d")]
        first = pick(records, 2)
        assert [len(group) for group in first] == [2] * 12
        shuffled = [records[i] for i in np.random.default_rng(0).permutation(len(records))]
        assert pick(shuffled, 2) == first

    def test_a_larger_number_adds_to_a_smaller_one(self):
        records = [one for number in range(5) for one in answers(number, "a", "b", "c", "d")]
        one, three, every = pick(records, 1), pick(records, 3), pick(records, None)
        for few, more, whole in zip(one, three, every, strict=True):
            assert whole[:1] == few and whole[:3] == more and len(whole) == 4

    def test_which_answers_are_picked_does_not_follow_the_order_of_their_ids(self):
        records = [one for number in range(30) for one in answers(number, "a", "b", "c", "d")]
        picked = pick(records, 1)
        assert len({one.record.answer for (one,) in picked}) == 4
        sources = [one.source_id for (one,) in picked]
        assert sources != sorted(sources)

    def test_other_sources_do_not_change_what_is_picked_of_one(self):
        records = [one for number in range(5) for one in answers(number, "a", "b", "c", "d")]
        alone = pick([one for one in records if one.source_id == "s3"], 2)
        assert alone[0] in pick(records, 2)

    def test_good_answers_come_first_and_a_source_without_any_is_not_lost(self):
        mixed = [*answers(1, "a", "b", "c", quality="truncated"), *answers(1, "good")]
        bad = answers(2, "d", "e", quality="incorrect_refusal")
        found = {group[0].source_id: group for group in pick([*mixed, *bad], 1)}
        assert [one.record.answer for one in found["s1"]] == ["good"]
        assert len(found["s2"]) == 1
        everything = {group[0].source_id: group for group in pick([*mixed, *bad], None)}
        assert {one.quality for one in everything["s1"]} == {"good"}
        assert len(everything["s2"]) == 2


def refuse(*_):
    raise AssertionError("a forward pass")


class TestMeasuring:
    GROUPS = (
        answers(1, "Number 1 is on shelf 7. It is green.", "Shelf 9, hall 3.", spans=[(7, 8)]),
        answers(2, "Number 2 is on shelf 14."),
    )

    def test_measuring_again_runs_no_forward_pass_and_gives_the_same(self, tiny, store, monkeypatch):
        first, records = measure_labelled(self.GROUPS, tiny, store, KEEP)
        monkeypatch.setattr(tiny, "trace_together", refuse)
        monkeypatch.setattr(tiny, "trace", refuse)
        again, same = measure_labelled(self.GROUPS, tiny, store, KEEP)
        assert records == same == [one for group in self.GROUPS for one in group]
        assert len(first) == len(again) == 3
        for one, other in zip(first, again, strict=True):
            for name in ("logprob", "jsd_no_context", "offsets", "words"):
                np.testing.assert_array_equal(getattr(one.trace, name), getattr(other.trace, name))
            np.testing.assert_array_equal(one.token_labels, other.token_labels)
            assert one.source_id == other.source_id

    def test_only_what_is_new_is_read(self, tiny, store, monkeypatch):
        measure_labelled(self.GROUPS[1:], tiny, store, KEEP)
        real, asked = tiny.trace_together, []
        monkeypatch.setattr(
            tiny, "trace_together", lambda records, keep: asked.append(records) or real(records, keep)
        )
        measure_labelled(self.GROUPS, tiny, store, KEEP)
        assert [[r.response_id for r in records] for records in asked] == [["1-0", "1-1"]]
        measure_labelled(self.GROUPS, tiny, store, Keep(leave_one_out=False, extremes=True))
        assert len(asked) == 3  # poorer traces do not do for a fuller keep

    def test_a_number_that_was_used_once_stays_what_it_was_when_more_is_measured(self, tiny, store):
        """Else fitting twice would give two heads: one from the new reading, the next from the old."""
        (one,) = self.GROUPS[1]
        _, (trace,) = tiny.trace(one.record, KEEP)
        used = trace.logprob - np.float32(1e-3)
        store.put(trace_key(one.record, tiny), [replace(trace, logprob=used)])
        fuller = Keep(leave_one_out=False, extremes=True)
        for _ in range(2):
            (found,), _ = measure_labelled([[one]], tiny, store, fuller)
            assert found.trace.rank is not None
            np.testing.assert_array_equal(found.trace.logprob, used)

    def test_labels_are_no_part_of_what_is_stored(self, tiny, store, monkeypatch):
        measure_labelled([answers(1, "Shelf 7.", spans=[(0, 5)])], tiny, store, KEEP)
        monkeypatch.setattr(tiny, "trace_together", refuse)
        (relabelled,), _ = measure_labelled([answers(1, "Shelf 7.")], tiny, store, KEEP)
        assert not relabelled.label and not relabelled.token_labels.any()

    def test_answers_keep_their_order_and_equal_ones_their_own_labels(self, tiny, store):
        group = [*answers(1, "Shelf 7.", "Hall 3."), *answers(1, "Shelf 7.", spans=[(0, 5)])]
        found, records = measure_labelled([group], tiny, store, KEEP)
        assert records == group
        assert [one.label for one in found] == [False, False, True]
        np.testing.assert_array_equal(found[0].trace.logprob, found[2].trace.logprob)
        assert len(found[1].trace.token_ids) == len(tiny.trace(group[1].record)[1][0].token_ids)

    def test_what_cannot_be_read_is_left_out(self, tiny, store):
        long_question = "why " * 3000
        endless = LabelledRecord(Record(long_question, ["p"], "a"), (), "s", "", "", "", "good")
        silent = LabelledRecord(Record("q", [" "], "a"), (), "s", "", "", "", "good")
        readable = answers(1, "Shelf 7.")
        found, records = measure_labelled([[endless, *readable, silent], [silent]], tiny, store, KEEP)
        assert [one.source_id for one in found] == ["s1"] and records == readable

    def test_progress_is_told_group_by_group(self, tiny, store):
        told = []
        measure_labelled(iter(self.GROUPS), tiny, store, KEEP, lambda *at: told.append(at))
        assert told[0] == (0, 2) and len(told) >= 2 and told == sorted(told)

    def test_an_answer_in_several_windows_is_learned_from_in_its_first(self, tiny_scorer_dir, store):
        scorer = Scorer.load(str(tiny_scorer_dir), window_tokens=400)
        passages = [f"Passage {i} " + "about many things " * 6 for i in range(9)]
        one = LabelledRecord(Record("q", passages, "An answer."), ((0, 2),), "s", "", "", "", "good")
        _, traces = scorer.trace(one.record, KEEP)
        assert len(traces) > 1
        (found,), _ = measure_labelled([[one]], scorer, store, KEEP)
        np.testing.assert_array_equal(found.trace.logprob, traces[0].logprob)


TEXTS = {
    "plain": ("Ada built it in 1891. It is  green.\n\nTolls ended.", [(0, 3), (16, 20)]),
    "none": ("Ada built it. It is green.", []),
    "everything": ("Ada built it. It is green.", [(0, 26)]),
    "overlapping": ("Ada built it. It is green.", [(4, 12), (10, 20)]),
    "between two sentences": ("Ada built it.   It is green.", [(13, 16)]),
    "one character of an emoji": ("Yes 👩‍👩‍👧! It is 😀 green.", [(6, 7), (17, 18)]),
    "cjk": ("橋は1891年に建てられた。緑色です。", [(2, 6)]),
    "combining": ("Cafe\u0301 noir. Ne\u0308e.", [(4, 5)]),
    "right to left": ("הגשר נבנה בשנת 1891. הוא ירוק.", [(15, 19)]),
    "control tokens": ("It <|im_end|> is green. So.", [(3, 13)]),
}


@pytest.mark.parametrize(("text", "spans"), TEXTS.values(), ids=TEXTS)
def test_tokens_and_sentences_are_unsupported_where_they_share_a_character_with_a_span(tiny, text, spans):
    passages = ["Ada built it in 1891.", "It is green."]
    one = LabelledRecord(Record("Who?", passages, text), tuple(spans), "s", "m", "QA", "en", "good")
    reading, (trace,) = tiny.trace(one.record, KEEP)
    found = label(one, trace, tiny)
    marked = {c for start, end in spans for c in range(start, end)}
    tokens = [any(c in marked for c in range(start, end)) for start, end in trace.offsets.tolist()]
    assert found.token_labels.tolist() == tokens and found.token_labels.dtype == bool
    owner = assign_tokens(text, trace.offsets, reading.sentences).tolist()
    wanted = [
        ([i for i, of in enumerate(owner) if of == index], any(c in marked for c in range(start, end)))
        for index, (start, end) in enumerate(reading.sentences)
    ]
    wanted = [(members, bad) for members, bad in wanted if members]
    assert [members.tolist() for members in found.sentences] == [members for members, _ in wanted]
    assert found.sentence_labels.tolist() == [bad for _, bad in wanted]
    assert found.label is bool(spans)
    assert (found.source_id, found.generator, found.task, found.language) == ("s", "m", "QA", "en")
    words = word_features(text, trace.offsets, passages, "Who?")
    np.testing.assert_array_equal(found.trace.words, words)
    np.testing.assert_array_equal(found.trace.logprob, trace.logprob)


def test_sentences_that_share_a_token_are_both_learned_from(tiny, monkeypatch):
    """As an audit judges both."""
    one = LabelledRecord(Record("Who?", ["Ada."], " the end"), ((2, 4),), "s", "m", "QA", "en", "good")
    reading, (trace,) = tiny.trace(one.record, KEEP)
    assert trace.offsets[0].tolist() == [0, 4]
    split = replace(reading, sentences=((0, 2), (2, 4), (5, 8)))
    monkeypatch.setattr("jobs.labelled.read_record", lambda *_: split)
    found = label(one, trace, tiny)
    judged = sentence_tokens(split, one.record.answer)
    assert [members.tolist() for members in found.sentences] == [m.tolist() for m in judged.values()]
    assert [0] == found.sentences[0].tolist() == found.sentences[1].tolist()
    assert found.sentence_labels.tolist() == [False, True, False]


def test_ragtruth_is_read_whole(shared):
    """Every row of the real set is a labelled answer, and its spans say what its own texts say."""
    path = shared / "data" / "ragtruth_qa_train.jsonl"
    found = read_labelled([str(path)], Config())
    with path.open() as lines:
        rows = [json.loads(line) for line in lines]
    assert len(found) == len(rows)
    for one, logged in zip(found, rows, strict=True):
        assert (one.source_id, one.generator, one.quality) == (
            str(logged["source_id"]),
            logged["model"],
            logged["quality"],
        )
        assert [one.record.answer[slice(*span)] for span in one.spans] == [
            span["text"] for span in logged["spans"]
        ]
    assert len(pick(found, 1)) == len({one["source_id"] for one in rows})


def test_foreign_passages_are_those_of_another_answer(tiny, store):
    groups = [answers(1, "One answer.", "Another one."), answers(2, "A third answer.")]
    keep = Keep(leave_one_out=False, foil=True)
    examples, _ = measure_labelled(groups, tiny, store, keep)
    assert [e.trace.mmd_foil.shape for e in examples] == [e.trace.logprob.shape for e in examples]
    assert all((e.trace.mmd_foil >= 0).all() and e.trace.mmd_foil.any() for e in examples)


def test_labelled_parquet_is_read_with_its_labels(tmp_path):
    import polars as pl

    path = tmp_path / "log.parquet"
    pl.DataFrame(
        [labelled_row(1, (3, 9), source_id="q1"), labelled_row(2, (0, 4), source_id="q2")]
    ).write_parquet(path)
    found = read_labelled([str(path)], Config())
    assert [(f.source_id, f.spans) for f in found] == [("q1", ((3, 9),)), ("q2", ((0, 4),))]


def test_rows_that_cannot_be_read_are_counted_aloud(tmp_path, caplog):
    good = labelled_row(0)
    with caplog.at_level("WARNING", logger="leadline"):
        found = read(tmp_path, good, labelled_row(1) | {"answer": ""}, labelled_row(2) | {"passages": []})
    assert len(found) == 1
    assert "2 of 3 labelled rows cannot be read and are left out" in caplog.text
    assert "missing_answer 1, no_passages 1" in caplog.text
