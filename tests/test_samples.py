"""The bundled sample logs hold what their README says, and the marked sentences stand where they are said to.

`policy-assistant.parquet` is written from `tests/samples/policy-assistant.json`. After a change of that file:

    python -c "import tests.test_samples as t, pyarrow.parquet as pq; \
        pq.write_table(t.policy_table(), t.PARQUET, compression='zstd')"
"""

import json
import re
from datetime import UTC, date, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from detector.sentences import split_sentences

ROOT = Path(__file__).resolve().parents[1]
JSONL = ROOT / "jobs/samples/support-desk.jsonl"
PARQUET = ROOT / "jobs/samples/policy-assistant.parquet"
SOURCE = ROOT / "tests/samples/policy-assistant.json"
TRUTH = json.loads((ROOT / "tests/samples/truth.json").read_text(encoding="utf-8"))
NIGHT = date(2026, 11, 29)
DIMENSIONS = ("app", "model", "retriever", "prompt_version", "language")

SCHEMA = pa.schema(
    [
        *[pa.field(name, pa.string()) for name in ("response_id", "trace_id")],
        pa.field("timestamp", pa.timestamp("us", tz="UTC")),
        *[pa.field(name, pa.string()) for name in DIMENSIONS],
        pa.field("user_input", pa.string()),
        pa.field("retrieved_contexts", pa.list_(pa.string())),
        pa.field("response", pa.string()),
    ]
)


def policy_table():
    """The readable source as the table that the Parquet file must hold."""
    rows = json.loads(SOURCE.read_text(encoding="utf-8"))
    return pa.Table.from_pylist(
        [row | {"timestamp": datetime.fromisoformat(row["timestamp"])} for row in rows], schema=SCHEMA
    )


def desk_lines():
    return JSONL.read_text(encoding="utf-8").splitlines()


def is_json(line):
    try:
        json.loads(line)
    except json.JSONDecodeError:
        return False
    return True


def rows():
    """Every row that parses, under Leadline's names, with the passages as a list of texts (or None)."""
    for row in map(json.loads, filter(is_json, desk_lines())):
        yield row | {
            "timestamp": datetime.fromisoformat(row["timestamp"]),
            "passages": [passage.get("text") for passage in row["passages"]],
        }
    for row in pq.read_table(PARQUET).to_pylist():
        yield row | {
            "question": row["user_input"],
            "passages": row["retrieved_contexts"],
            "answer": row["response"],
        }


def answers():
    return [row for row in rows() if row["passages"] and all(row["passages"])]


MARKED = [(response_id, mark) for response_id, marks in TRUTH.items() for mark in marks]
each_mark = pytest.mark.parametrize(
    ("response_id", "mark"), MARKED, ids=[f"{i}-{m['kind']}" for i, m in MARKED]
)


def test_the_parquet_file_holds_exactly_the_readable_source():
    assert pq.read_table(PARQUET).equals(policy_table())


def test_the_parquet_file_has_the_explicit_schema_and_is_zstd():
    file = pq.ParquetFile(PARQUET)
    assert file.schema_arrow.equals(SCHEMA)
    group = file.metadata.row_group(0)
    assert {group.column(index).compression for index in range(group.num_columns)} == {"ZSTD"}


def test_there_are_sixteen_answers_half_from_each_app_and_retriever():
    assert len(answers()) == 16
    for dimension in ("app", "retriever", "prompt_version"):
        values = [row[dimension] for row in answers()]
        assert sorted(values.count(value) for value in set(values)) == [8, 8], dimension
    assert len({row["model"] for row in answers()}) == 2
    assert sorted(row["language"] for row in answers() if row["language"] != "en") == ["de", "ja"]


def test_three_rows_must_be_rejected_each_for_another_reason():
    cut_off = [line for line in desk_lines() if not is_json(line)]
    no_passages = [row for row in rows() if not row["passages"]]
    no_text = [row for row in rows() if row["passages"] and not any(row["passages"])]
    assert (len(cut_off), len(no_passages), len(no_text)) == (1, 1, 1)
    assert len(desk_lines()) + pq.read_table(PARQUET).num_rows == len(answers()) + 3


def test_the_cut_off_line_is_the_last_and_ends_without_a_newline():
    text = JSONL.read_text(encoding="utf-8")
    assert not text.endswith("\n")
    assert not is_json(text.splitlines()[-1])


def test_ids_are_unique_and_every_row_has_its_dimensions():
    everything = list(rows())
    for name in ("response_id", "trace_id"):
        assert len({row[name] for row in everything}) == len(everything)
    for row in everything:
        assert re.fullmatch(r"[0-9a-f]{32}", row["trace_id"])
        assert all(row[dimension] for dimension in DIMENSIONS), row["response_id"]


def test_all_timestamps_lie_in_one_utc_day_in_file_order():
    for app in ("support-desk", "policy-assistant"):
        times = [row["timestamp"] for row in rows() if row["app"] == app]
        assert {time.astimezone(UTC).date() for time in times} == {NIGHT}
        assert times == sorted(times)
        assert times[-1] - times[0] > timedelta(hours=20)


def test_every_answer_has_three_to_five_passages_and_several_sentences():
    for row in answers():
        assert 3 <= len(row["passages"]) <= 5, row["response_id"]
        assert 3 <= len(split_sentences(row["answer"], row["language"])) <= 6, row["response_id"]


def test_truth_covers_every_audited_answer_and_nothing_else():
    assert set(TRUTH) == {row["response_id"] for row in answers()}


def test_about_a_third_of_the_answers_are_ungrounded():
    kinds = {"invented", "contradicted", "wrong_number", "courtesy"}
    assert {mark["kind"] for _, mark in MARKED} == kinds
    assert len({response_id for response_id, mark in MARKED if mark["kind"] != "courtesy"}) == 6
    assert all(mark["why"] for _, mark in MARKED)


@each_mark
def test_a_marked_sentence_is_one_sentence_of_its_answer_and_occurs_once(response_id, mark):
    [row] = [row for row in answers() if row["response_id"] == response_id]
    assert row["answer"].count(mark["sentence"]) == 1
    spans = split_sentences(row["answer"], row["language"])
    assert mark["sentence"] in [row["answer"][start:end] for start, end in spans]


@each_mark
def test_a_marked_sentence_stands_in_no_passage(response_id, mark):
    [row] = [row for row in answers() if row["response_id"] == response_id]
    assert not any(mark["sentence"] in passage for passage in row["passages"])


def test_no_address_leads_anywhere_but_example_com():
    for path in (JSONL, SOURCE):
        text = path.read_text(encoding="utf-8")
        assert set(re.findall(r"[\w.+-]+@([\w.-]*\w)", text)) <= {"example.com"}
        assert "://" not in text
