"""What words say beside the model, against a loop over characters, words and runs."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from detector.baselines import words
from detector.record import Record
from detector.words import COLUMNS, word_features
from tests.detector.test_methods import ANSWERS, PASSAGES

ABSENT = slice(0, 4)


def by_character(answer):
    return np.array([(i, i + 1) for i in range(len(answer))], dtype=np.int32).reshape(-1, 2)


def by_word(answer):
    return np.array([(start, end) for start, end, _ in words(answer)], dtype=np.int32).reshape(-1, 2)


def reference(answer, offsets, passages, question):
    """Token by token: its word, and every run of one to four words around it in every place of a passage."""
    own = list(words(answer))
    texts = [[key for _, _, key in words(passage)] for passage in passages]
    rows = []
    for start, end in offsets.tolist():
        mine = [i for c in range(start, end) for i, (s, e, _) in enumerate(own) if s <= c < e]
        if not mine:
            rows.append([0] * 7)
            continue
        i = mine[0]
        row = []
        for length in (1, 2, 3, 4):
            found = False
            for first in range(i - length + 1, i + 1):
                run = [key for _, _, key in own[first : first + length]] if first >= 0 else []
                for text in texts:
                    for at in range(len(text)):
                        found |= len(run) == length and text[at : at + length] == run
            row.append(0 if found else 1)
        s, e, key = own[i]
        row.append(key in [k for _, _, k in words(question)])
        row.append(any(c.isdigit() for c in answer[s:e]))
        row.append(answer[s].isupper())
        rows.append(row)
    return np.array(rows, dtype=np.float32).reshape(len(offsets), 7)


TEXT = st.text(alphabet="aB 1.,橋e\u0301😀", max_size=24)


@given(answer=TEXT, passages=st.lists(TEXT, max_size=3), question=TEXT, data=st.data())
def test_features_are_those_of_the_obvious_loop(answer, passages, question, data):
    cuts = data.draw(st.lists(st.integers(0, len(answer)), max_size=8).map(sorted))
    offsets = np.array(list(zip([0, *cuts], [*cuts, len(answer)], strict=True)), dtype=np.int32)
    found = word_features(answer, offsets, passages, question)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, reference(answer, offsets, passages, question))


def test_columns_are_named_in_order():
    answer = "Ada built 3 odd bridges"
    found = word_features(answer, by_word(answer), ["ada built 3 bridges"], "What did Ada build?")
    rows = dict(zip(answer.split(), found.tolist(), strict=True))
    assert rows["Ada"] == [0, 0, 0, 1, 1, 0, 1]
    assert rows["3"] == [0, 0, 0, 1, 0, 1, 0]
    assert rows["odd"] == [1, 1, 1, 1, 0, 0, 0]
    assert rows["bridges"] == [0, 1, 1, 1, 0, 0, 0]
    assert len(COLUMNS) == 7


def test_a_copied_sentence_is_present_at_every_length():
    found = word_features(PASSAGES[0], by_word(PASSAGES[0]), PASSAGES, "")
    assert not found[:, ABSENT].any()


def test_one_changed_number_breaks_the_runs_around_it_and_no_others():
    answer = PASSAGES[0].replace("1891", "1892")
    found = dict(zip(answer.split(), word_features(answer, by_word(answer), PASSAGES, ""), strict=True))
    assert found["1892"][ABSENT].tolist() == [1, 1, 1, 1]
    assert found["in"][ABSENT].tolist() == [0, 0, 0, 0]  # "was built in" stands there all the same
    assert found["by"][ABSENT].tolist() == [0, 0, 1, 1]  # "by Ada" does, "1892 by Ada" does not
    assert found["bridge"][ABSENT].tolist() == [0, 0, 0, 0]


def test_a_run_does_not_reach_from_one_passage_into_the_next():
    answer = "green bridge"
    apart = word_features(answer, by_word(answer), ["It is green", "bridge of Ada"], "")
    together = word_features(answer, by_word(answer), ["It is green bridge of Ada"], "")
    assert apart[:, 1].tolist() == [1, 1] and together[:, 1].tolist() == [0, 0]


def test_case_and_composition_make_no_difference_and_order_does():
    answer = "CAFÉ NOIR"
    for passage in ("café noir", "cafe\u0301 noir"):
        assert not word_features(answer, by_word(answer), [passage], "")[:, :2].any()
    assert word_features(answer, by_word(answer), ["noir café"], "")[:, :2].tolist() == [[0, 1], [0, 1]]


def test_a_token_belongs_to_the_word_of_its_first_character_that_is_in_one():
    answer = "odd, green things"
    offsets = np.array([(0, 3), (3, 4), (4, 10), (2, 8), (11, 17), (17, 17)], dtype=np.int32)
    found = word_features(answer, offsets, ["green"], "")
    assert found[:, 0].tolist() == [1, 0, 0, 1, 1, 0]


def test_what_is_no_word_claims_nothing():
    answer = " \n😀, – !"
    assert not word_features(answer, by_character(answer), ["nothing of it"], "").any()


def test_without_passages_every_word_is_absent_and_nothing_has_no_rows():
    found = word_features("Ada built", by_word("Ada built"), [], "")
    assert found[:, ABSENT].all()
    assert word_features("", by_word(""), PASSAGES, "q").shape == (0, 7)


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
def test_any_answer_of_a_scorer_has_a_row_of_zeros_and_ones_per_token(tiny, answer):
    reading, _ = tiny.trace(Record("Who?", PASSAGES, answer))
    offsets = np.array(reading.offsets, dtype=np.int32)
    found = word_features(answer, offsets, PASSAGES, "Who?")
    assert found.shape == (len(reading.answer_ids), 7)
    assert set(np.unique(found)) <= {0.0, 1.0}
    np.testing.assert_array_equal(found, reference(answer, offsets, PASSAGES, "Who?"))
