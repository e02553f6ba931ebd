from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from detector.sentences import detect_language, group_sentences, split_sentences


def texts(text, language=None):
    return [text[start:end] for start, end in split_sentences(text, language)]


@given(st.text(alphabet="ab .!?\n-*1|`#。！😀é\u0301\u2028\t", max_size=60))
def test_every_visible_character_is_in_exactly_one_sentence(text):
    spans = split_sentences(text)
    assert all(a_end <= b_start for (_, a_end), (b_start, _) in pairwise(spans))
    assert "".join("".join(text[s:e].split()) for s, e in spans) == "".join(text.split())
    assert all(text[s:e] == text[s:e].strip() for s, e in spans)


def test_abbreviations_and_numbers_do_not_end_a_sentence():
    assert texts("Dr. Ada paid 3.50 EUR, e.g. in May. She left.") == [
        "Dr. Ada paid 3.50 EUR, e.g. in May.",
        "She left.",
    ]


def test_list_items_table_rows_headings_and_code_are_cut_apart():
    answer = (
        "# Steps\nDo this:\n1. Open it. Wait.\n2. Close it.\n- Done\n"
        "| a | b |\n|---|---|\n| 1. x | y |\n```\na. b\n```\nEnd."
    )
    assert texts(answer) == [
        "# Steps",
        "Do this:",
        "1. Open it.",
        "Wait.",
        "2. Close it.",
        "- Done",
        "| a | b |",
        "|---|---|\n| 1. x | y |",
        "```\na. b\n```",
        "End.",
    ]


def test_a_marker_without_words_joins_the_sentence_after_it():
    assert texts("*\n\nYes. ...") == ["*\n\nYes. ..."]
    assert texts("1.\nYes.") == ["1.\nYes."]


@pytest.mark.parametrize(
    ("text", "logged", "expected"),
    [
        ("你好。再见。", "en", "zh"),
        ("これは文です。", None, "ja"),
        ("東京タワー", None, "ja"),
        ("안녕", None, "ko"),
        ("Hallo Welt", "de-AT", "de"),
        ("Hello", "zh", "en"),
        ("Привіт", "uk", "uk"),
        ("สวัสดี", None, "th"),
        ("123 !", None, "en"),
    ],
)
def test_language_follows_the_script_before_the_label(text, logged, expected):
    assert detect_language(text, logged) == expected


def test_chinese_logged_as_english_is_still_split():
    assert texts("你好。再见。", "en") == ["你好。", "再见。"]


def test_groups_are_whole_sentences_at_most_k():
    text = "One. Two two. Three three three. Four. Five. Six six. Seven."
    for k in range(1, 9):
        groups = group_sentences(text, k)
        assert len(groups) == min(k, 7)
        assert "".join("".join(text[s:e].split()) for s, e in groups) == "".join(text.split())
