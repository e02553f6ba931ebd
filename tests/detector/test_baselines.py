"""Words in any script."""

import pytest

from detector import baselines


def keys(text):
    return [key for _, _, key in baselines.words(text)]


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


def test_a_changed_number_is_another_word():
    for other in ("18915", "1,891", "1891.5", "91"):
        assert keys(other) != keys("1891")


def test_composed_and_decomposed_spellings_are_the_same_word():
    assert keys("cafe\u0301") == keys("Café")
