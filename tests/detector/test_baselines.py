"""Word overlap in any script."""

import numpy as np
import pytest

from detector import baselines
from detector.record import Record
from tests.detector.test_methods import ANSWERS, PASSAGES


def keys(text):
    return [key for _, _, key in baselines.words(text)]


def overlap(answer, passages):
    """Per character of the answer."""
    cut = np.array([(i, i + 1) for i in range(len(answer))], dtype=np.int32)
    return baselines.word_overlap(answer, cut, passages)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("It's GREEN, isn't it?", ["it", "s", "green", "isn", "t", "it"]),
        ("in 1,891 or 3.5 kg at 10:30.", ["in", "1,891", "or", "3.5", "kg", "at", "10:30"]),
        ("Version2.0 B12 1950s", ["version2.0", "b12", "1950s"]),
        ("橋は1891年", ["橋", "は", "1891", "年"]),
        ("１８９１", ["1891"]),
        ("Cafe\u0301 Café", ["café", "café"]),
        ("हिन्दी में", ["हिन्दी", "में"]),
        ("שָׁלוֹם عربي", ["שָׁלוֹם", "عربي"]),
        ("한국어는 좋다", ["한국어는", "좋다"]),
        ("ภาษา ๑๒", ["ภ", "า", "ษ", "า", "๑๒"]),
        ("STRASSE straße _x_", ["strasse", "strasse", "x"]),
        ("😀 👩‍👩‍👧! — ...", []),
    ],
)
def test_words_in_many_scripts(text, wanted):
    import unicodedata

    assert keys(text) == [unicodedata.normalize("NFKC", word) for word in wanted]


def test_words_say_where_they_stand():
    text = "👩‍👩‍👧 Ne\u0308e 橋 12.5%"
    assert [text[start:end] for start, end, _ in baselines.words(text)] == ["Ne\u0308e", "橋", "12.5"]


def test_a_token_is_present_when_its_word_is_in_some_passage():
    answer = "Ada built tolls."
    cut = np.array([(0, 3), (3, 6), (6, 9), (9, 15), (15, 16)], dtype=np.int32)  # " built" in two tokens
    found = baselines.word_overlap(answer, cut, ["It was ADA.", "Tolls ended."])
    np.testing.assert_array_equal(found, [True, False, False, True, True])
    np.testing.assert_array_equal(baselines.score_overlap(found), [0, 1, 1, 0, 0])
    assert baselines.score_overlap(found).dtype == np.float32


def test_a_changed_number_is_absent_however_much_of_it_is_there():
    assert overlap("1891", ["in 1891."]).all()
    for passage in ("18915", "1,891", "1891.5", "91"):
        assert not overlap("1891", [passage]).any()


def test_a_part_of_a_word_is_not_the_word():
    assert not overlap("art", ["party"]).any()


def test_chinese_is_compared_by_character():
    np.testing.assert_array_equal(overlap("橋梁。", ["橋は古い"]), [True, False, True])


def test_composed_and_decomposed_spellings_are_the_same_word():
    assert overlap("cafe\u0301", ["Café"]).all()


def test_a_token_that_covers_a_present_and_an_absent_word_is_absent():
    found = baselines.word_overlap("橋年", np.array([(0, 2)], dtype=np.int32), ["橋"])
    np.testing.assert_array_equal(found, [False])


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
def test_any_answer_has_one_value_per_token_and_stands_in_itself(tiny, answer):
    _, (found,) = tiny.trace(Record(question="Who?", passages=PASSAGES, answer=answer))
    against_itself = baselines.word_overlap(answer, found.offsets, [answer])
    assert against_itself.shape == found.token_ids.shape and against_itself.dtype == np.bool_
    assert against_itself.all()
    against_nothing = baselines.word_overlap(answer, found.offsets, [])
    with_word = [
        any(s < end and start < e for s, e, _ in baselines.words(answer)) for start, end in found.offsets
    ]
    np.testing.assert_array_equal(against_nothing, ~np.array(with_word))


def test_a_sentence_scores_the_share_of_its_words_that_no_passage_holds():
    answer = "Ada built it. It fell, fell! 😀"
    spans = [(0, 13), (14, 28), (29, 30)]
    assert [answer[a:b] for a, b in spans] == ["Ada built it.", "It fell, fell!", "😀"]
    np.testing.assert_allclose(baselines.absent_words(answer, spans, ["Ada, it."]), [1 / 3, 2 / 3, 0])
