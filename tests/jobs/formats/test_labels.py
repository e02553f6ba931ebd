from datetime import UTC, datetime

import pytest

from detector.record import Record
from jobs.formats import record_date
from jobs.formats.labels import identifier, label, parse_language, parse_time
from tests.jobs.formats.reading import GOOD, read, read_lines, read_row, to_bytes

MOMENT = datetime(2026, 10, 1, 2, 3, 4, tzinfo=UTC)


@pytest.mark.parametrize(
    "value",
    [
        "2026-10-01T02:03:04Z",
        "2026-10-01T02:03:04",
        "2026-10-01 02:03:04 UTC",
        "2026-10-01T04:03:04+02:00",
        " 20261001T020304Z ",
        "1790820184",
        1790820184,
        1790820184.0,
        1790820184000,
        1790820184000000,
        1790820184000000000,
        "1790820184000",
        datetime(2026, 10, 1, 2, 3, 4),
        MOMENT,
    ],
    ids=repr,
)
def test_time_in_every_notation_is_utc(value):
    assert parse_time(value) == MOMENT


@pytest.mark.parametrize(
    "value",
    [
        None,
        "",
        "yesterday",
        0,
        5,
        -1,
        1e40,
        float("nan"),
        float("inf"),
        True,
        [],
        {},
        "0001-01-01",
        "9999-12-31T23:59:59-14:00",
    ],
    ids=repr,
)
def test_nonsense_is_no_time(value):
    assert parse_time(value) is None


def test_a_nonsense_timestamp_is_no_reject(tmp_path):
    assert read_row(tmp_path, {**GOOD, "timestamp": "soon"}).record.timestamp is None


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("en", "en"),
        ("EN-us", "en"),
        ("pt_BR", "pt"),
        ("zh-Hans-CN", "zh"),
        ("english", None),
        ("e", None),
        (7, None),
        ("", None),
    ],
)
def test_languages_are_two_letters(value, expected):
    assert parse_language(value) == expected


@pytest.mark.parametrize(
    "name", ["response_id", "id", "record_id", "span_id", "trace_id", "gen_ai.response.id"]
)
def test_an_id_of_the_answer_is_kept_as_it_is(tmp_path, name):
    assert read_row(tmp_path, {**GOOD, name: " An id/../x "}).record.response_id == " An id/../x "


def test_an_id_of_the_question_is_made_one_of_the_answer(tmp_path):
    rows = [
        {**GOOD, "query_id": "q1"},
        {**GOOD, "query_id": "q1", "answer": "Another."},
        {**GOOD, "query_id": "q1", "passages": ["Other."]},
        {**GOOD, "query_id": "q1"},
    ]
    ids = [row.record.response_id for row in read_lines(tmp_path, *rows)]
    assert all(one.startswith("q1#") and len(one) == 11 for one in ids)
    assert len(set(ids)) == 3 and ids[0] == ids[3]


def test_without_an_id_the_object_and_the_position_are_the_id(tmp_path):
    for name in ("one.jsonl", "two.jsonl"):
        (tmp_path / name).write_bytes(b"".join([to_bytes(GOOD) + b"\n"] * 2))
    ids = [row.record.response_id for row in read(tmp_path)]
    assert len(set(ids)) == 4
    assert ids == [row.record.response_id for row in read(tmp_path)]
    assert ids[0].endswith("-0")


def test_trace_and_span_have_their_own_columns(tmp_path):
    record = read_row(tmp_path, {**GOOD, "id": "r", "traceId": "t", "context": {"span_id": "s"}}).record
    assert (record.response_id, record.trace_id, record.span_id) == ("r", "t", "s")


@pytest.mark.parametrize(
    ("one", "other"),
    [("x" * 600, "x" * 599 + "y"), ("a\nb", "a\tb"), ("a\u202eb", "ab"), ("\ud800", "\ud801")],
    ids=["long", "control", "bidi", "surrogate"],
)
def test_unfit_ids_are_cleaned_and_stay_different(one, other):
    first, second = identifier(one), identifier(other)
    assert first != second
    for clean in (first, second):
        assert len(clean) <= 512 and clean.isprintable()
        clean.encode()


def test_binary_ids_become_text():
    assert identifier(b"\xff\x00\x10") == "ff0010"
    assert identifier(b"abc") == "abc"


@pytest.mark.parametrize("value", [None, "", "  ", [], {"$oid": "x"}, True, float("nan")])
def test_what_is_no_id_is_none(value):
    assert identifier(value) is None


def test_long_labels_are_cut_and_stay_different():
    one, other = label("x" * 300 + "1"), label("x" * 300 + "2")
    assert one != other and len(one) == len(other) == 256


def test_dimensions_come_from_the_row_then_its_metadata_then_its_folders(tmp_path):
    folder = tmp_path / "app=from%20folder" / "model=from-folder" / "retriever=bm25"
    folder.mkdir(parents=True)
    row = {
        **GOOD,
        "model_name": "from row",
        "metadata": {"app": "from metadata", "model": "x", "lang": "de-AT"},
    }
    record = read_row(folder, row).record
    assert (record.app, record.model, record.retriever) == ("from metadata", "from row", "bm25")
    assert (record.language, record.prompt_version) == ("de", None)
    assert read_row(folder, GOOD).record.app == "from folder"


def test_fields_may_name_a_folder(tmp_path):
    (tmp_path / "tenant=acme").mkdir()
    assert read_row(tmp_path / "tenant=acme", GOOD, app="tenant").record.app == "acme"


def test_metadata_may_be_a_json_string(tmp_path):
    record = read_row(tmp_path, {**GOOD, "metadata": '{"app": "shop", "tier": 3}'}).record
    assert (record.app, record.metadata["tier"]) == ("shop", "3")


def test_metadata_keeps_small_scalars_only(tmp_path):
    row = {
        **GOOD,
        "tier": "gold",
        "ok": True,
        "n": 3,
        "big": "x" * 300,
        "list": [1],
        "none": None,
        "k" * 100: "v",
    }
    assert read_row(tmp_path, row).record.metadata == {"tier": "gold", "ok": "true", "n": "3"}


def test_metadata_is_bounded(tmp_path):
    assert len(read_row(tmp_path, {**GOOD, **{f"k{i}": i for i in range(500)}}).record.metadata) == 32


def test_a_reject_tells_what_its_row_still_says(tmp_path):
    folder = tmp_path / "app=shop"
    folder.mkdir()
    row = {"question": "Q", "query_id": "q9", "trace_id": "t", "model": "m", "timestamp": MOMENT.isoformat()}
    rejected = read_row(folder, row)
    assert (rejected.reason, rejected.app, rejected.model) == ("missing_answer", "shop", "m")
    assert (rejected.response_id, rejected.trace_id, rejected.timestamp) == ("t", "t", MOMENT)
    (broken,) = read_lines(folder, "{broken")
    assert (broken.reason, broken.app, broken.response_id) == ("malformed_row", "shop", None)


@pytest.mark.parametrize(
    ("timestamp", "partitions", "expected"),
    [
        (MOMENT, {"date": "2020-01-01"}, "2026-10-01"),
        (datetime.fromisoformat("2026-10-01T23:30:00-05:00"), {}, "2026-10-02"),
        (None, {"date": "2026-10-05"}, "2026-10-05"),
        (None, {"dt": "20261005"}, "2026-10-05"),
        (None, {"day": "2026-10-05T03"}, "2026-10-05"),
        (None, {"Year": "2026", "month": "3", "day": "7"}, "2026-03-07"),
        (None, {"year": "2026", "month": "13", "day": "7"}, None),
        (None, {"date": "today"}, None),
        (None, {}, None),
    ],
)
def test_the_date_of_a_row(timestamp, partitions, expected):
    record = Record(question="q", passages=["p"], answer="a", timestamp=timestamp)
    assert record_date(record, partitions) == expected
