import pytest

from jobs.formats.json_text import embedded, loads


def test_constants_that_json_does_not_know_are_null():
    assert loads(b'[NaN, Infinity, -Infinity, {"a": NaN}]') == [None, None, None, {"a": None}]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b'{"a": 1', "not JSON .* at character 7"),
        (b"\xff", "not UTF-8 .byte 0"),
        (b"[" * 100_000, "nested too deeply"),
        (b"1" * 5000, "too many digits"),
        ('{"a": 1}'.encode("utf-16"), "not UTF-8"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(data, message):
    with pytest.raises(ValueError, match=message):
        loads(data)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('["a"]', ["a"]),
        (' {"a": NaN} ', {"a": None}),
        ('"a"', "a"),
        ("['it\\'s', None]", ["it's", None]),
        ("{'a': ('b',)}", {"a": ("b",)}),
    ],
)
def test_lists_objects_and_strings_inside_a_string(text, expected):
    assert embedded(text) == expected


@pytest.mark.parametrize(
    "text", ["", "text", "[1] and [2]", "17", "null", "{1, 2}", "[f(1)]", "[x for x in y]", "'a'"]
)
def test_text_that_holds_nothing_is_text(text):
    assert embedded(text) is None


@pytest.mark.parametrize(
    "text", ["[" + "1," * 60_000 + "]", "['" + "a" * (1 << 20) + "',]"], ids=["items", "size"]
)
def test_python_literals_are_parsed_up_to_a_size(text):
    assert embedded(text) is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("['a.'\n 'b.']", ["a.", "b."]),
        ("['it''s' \"b 'c' d\"]", ["it", "s", "b 'c' d"]),
        ("[{'text': 'a' , 'n': 1}\n {'text': 'b'}]", [{"text": "a", "n": 1}, {"text": "b"}]),
        ("[['a' 'b']\n ['c']]", [["a", "b"], ["c"]]),
        ("['a',\n 'b']", ["a", "b"]),
        ('[\'say "x" "y" [z] [w]\']', ['say "x" "y" [z] [w]']),
        ("['a' 'b", None),
        ("['a' b]", None),
    ],
)
def test_items_of_an_array_stand_side_by_side(text, expected):
    assert embedded(text) == expected
