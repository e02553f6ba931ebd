"""The labelled sets of tests/figures: what was edited is what is labelled, and nothing else differs."""

import dataclasses
import json
import random
import re
from collections import Counter

import pytest

from detector.sentences import split_sentences
from tests.figures import edited, mushroom, ragtruth
from tests.figures.edited import changed, swapped

ROWS = [
    # question, passages, answer; one source each
    ("butcher opening hours", ["The butcher opened in 1984 and sells 350 pies."], "It opened in 1984."),
    ("famous tram lines", ["Tram 28 serves 1,250 people in San Francisco."], "It serves 1,250 people daily."),
    ("garden petunia seeds", ["Plant them on April 12 or later."], "Start them on April 12, not before."),
    ("computer company founder", ["Apple was founded by Steve Jobs."], "Its founder was Steve Jobs himself."),
    ("oven chicken roast", ["Roast for 45 minutes."], "1. Preheat it.\n10. Roast for 45 minutes \U0001f357."),
    ("river bridges", ["The Yangtze River has 115 bridges."], "There are 115 over the Yangtze River."),
]  # fmt: skip


def row(number, question, passages, answer, **changes):
    base = {
        "id": f"r{number}",
        "source_id": f"s{number}",
        "question": question,
        "passages": passages,
        "answer": answer,
        "lang": "en",
        "quality": "good",
        "spans": [],
    }
    return base | changes


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Six grounded answers, and three that must not be used."""
    rows = [row(i, *texts) for i, texts in enumerate(ROWS)]
    rows += [
        row(6, "unlabelled", ["It has 77 rooms."], "There are 77 rooms.", spans=[{"start": 0, "end": 5}]),
        row(7, "refused", ["It has 88 rooms."], "There are 88 rooms.", quality="incorrect_refusal"),
        row(0, *ROWS[0], id="r0-again"),
    ]
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def real(shared):
    """Forty pairs of each set from the real answers."""
    path = shared / "data" / ragtruth.PATH.name
    return swapped(40, 1, path), changed(40, 1, path), path


def pairs(examples):
    return list(zip(examples[::2], examples[1::2], strict=True))


def check_pair(one, twin, originals):
    assert (one.twin, twin.twin, twin.spans) == (False, True, ())
    assert (one.source_id, one.kind) == (twin.source_id, twin.kind)
    assert (twin.record, twin.source_id) in originals
    assert one.record.question == twin.record.question
    assert one.record.response_id == f"{twin.record.response_id}:{one.kind}"


def check_changed(examples, originals):
    for one, twin in pairs(examples):
        check_pair(one, twin, originals)
        ((start, end),) = one.spans
        new, answer, before = one.record.answer[start:end], one.record.answer, twin.record.answer
        old = before[start : end + len(before) - len(answer)]
        assert answer[:start] + old + answer[end:] == before and new != old
        assert one.record.passages == twin.record.passages
        assert any(s <= start and end <= e for s, e in split_sentences(answer, "en"))
        texts = [passage.text for passage in one.record.passages]
        assert any(old in text for text in texts)
        for text in [*texts, before, one.record.question]:
            assert new.casefold() not in text.casefold()
            assert new.replace(",", "").casefold() not in text.replace(",", "").casefold()
        if one.kind == "number":
            assert re.sub(r"\d", "9", new) == re.sub(r"\d", "9", old)
            assert int(re.sub(r"\D", "", old)) <= 2 * int(re.sub(r"\D", "", new)) + 1
        elif one.kind == "date":
            months = re.compile("|".join(edited._MONTHS))
            as_form = [re.sub(r"\d+", "9", months.sub("M", text)) for text in (old, new)]
            assert as_form[0] == as_form[1]
        else:
            assert one.kind == "name" and new in edited._GROUP[old]


def check_swapped(examples, originals):
    for one, twin in pairs(examples):
        check_pair(one, twin, originals)
        assert one.kind == "swapped"
        assert one.record.answer == twin.record.answer
        assert one.spans == ((0, len(one.record.answer)),)
        donors = {source for record, source in originals if record.passages == one.record.passages}
        assert donors and one.source_id not in donors
        assert not {p.text for p in one.record.passages} & {p.text for p in twin.record.passages}


def clean(path):
    return [(answer.record, answer.source_id) for answer in ragtruth.load(path) if not answer.spans]


def test_changed_replaces_one_grounded_thing_inside_its_span_and_nothing_else(small):
    examples = changed(6, 0, small)
    check_changed(examples, clean(small))
    assert Counter(one.kind for one in examples if not one.twin).keys() == {"number", "name", "date"}


def test_swapped_takes_all_passages_of_another_question(small):
    check_swapped(swapped(6, 0, small), clean(small))


def test_the_sets_hold_on_the_real_answers(real):
    with_passages_swapped, with_a_thing_changed, path = real
    originals = clean(path)
    check_swapped(with_passages_swapped, originals)
    check_changed(with_a_thing_changed, originals)
    assert {one.kind for one in with_a_thing_changed} >= {"number", "name"}  # dates are few
    refusals = [one for one in with_passages_swapped if "unable to answer" in one.record.answer.lower()]
    assert not refusals


@pytest.mark.parametrize("make", [swapped, changed])
def test_the_same_seed_gives_the_same_set_and_a_smaller_one_is_its_beginning(small, make):
    state = random.getstate()
    examples = make(5, 3, small)
    assert make(5, 3, small) == examples
    assert make(2, 3, small) == examples[:4]
    assert any(make(5, seed, small) != examples for seed in range(3))
    assert random.getstate() == state


@pytest.mark.parametrize("make", [swapped, changed])
def test_only_clean_answers_of_distinct_sources_are_used(small, make):
    examples = make(6, 0, small)
    assert sorted(one.source_id for one in examples if one.twin) == [f"s{i}" for i in range(6)]
    with pytest.raises(ValueError, match="7 pairs asked, 6 can be made"):
        make(7, 0, small)


@pytest.mark.parametrize(
    ("answer", "passage", "kinds"),
    [
        ("It was built in 1891.", "Built in 1891.", {"number": ["1891"]}),
        ("It was built in 1891.", "Built in 18910.", {}),  # not a whole token there
        ("It was built in 1891, yes 1891.", "Built in 1891.", {}),  # twice in the answer
        ("Step:\n10. Mix it.", "Wait 10 minutes.", {}),  # the number of a list item
        ("Born on May 12 there.", "May 12 it was.", {"date": ["May 12"]}),  # and no number 12
        ("It may be in May 2001.", "In May 2001.", {"date": ["May"], "number": ["2001"]}),
        ("From 10-15 to 12:30, B12 and 1/16.", "10-15 12:30 B12 1/16", {}),
        ('Click "Las Vegas" or Las Vegas Blvd.', "Las Vegas", {}),
        ("He saw Las Vegas.", "Las Vegas it was.", {"name": ["Las Vegas"]}),
        ("About $1,250.50 each, 4.", "It is $1,250.50, 4.", {"number": ["1,250.50"]}),
    ],
)
def test_what_may_be_replaced(tmp_path, answer, passage, kinds):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row(0, "q", [passage], answer)))
    found = edited._places(ragtruth.load(path))
    assert {kind: [p.text for p in places] for kind, places in found.items() if places} == kinds


@pytest.mark.parametrize("text", ["10", "99", "350", "1,250.50", "10000", "1891", "2016", "20.5"])
def test_another_number_keeps_its_form_and_stays_near(text):
    chooser = random.Random(0)
    drawn = {edited._other_number(text, chooser) for _ in range(200)}
    assert len(drawn - {text}) > 1
    for new in drawn:
        assert re.sub(r"\d", "9", new) == re.sub(r"\d", "9", text)
        value, was = (float(number.replace(",", "")) for number in (new, text))
        assert was / 2 - 1 <= value <= was * 2


def test_every_name_has_one_group_and_company_in_it():
    names = [name for group in edited._NAMES for name in group]
    assert len(names) == len(set(names)) and all(len(group) > 1 for group in edited._NAMES)


def test_mushroom_is_read_whole_with_spans_inside_the_answers(shared):
    answers = mushroom.load(shared / "data" / mushroom.PATH.name)
    assert Counter(answer.language for answer in answers) == {"de": 200, "fr": 49, "hi": 50}
    for answer in answers:
        length = len(answer.record.answer)
        assert all(0 <= start < end <= length for start, end in answer.spans)
        assert all(0 <= s < e <= length and 0 < share <= 1 for s, e, share in answer.soft_spans)
        assert answer.record.language == answer.language
    assert sum(not answer.record.passages for answer in answers) == 4


@pytest.mark.parametrize("module", [ragtruth, mushroom])
def test_a_loader_says_in_one_line_that_the_data_is_not_here(tmp_path, module):
    with pytest.raises(SystemExit) as stopped:
        module.load(tmp_path / "nothing.jsonl")
    assert "not here" in str(stopped.value) and "\n" not in str(stopped.value)


def test_an_example_cannot_be_altered(small):
    with pytest.raises(dataclasses.FrozenInstanceError):
        changed(1, 0, small)[0].kind = "other"
