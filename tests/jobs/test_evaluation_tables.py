import json
from dataclasses import asdict, fields

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs.evaluation_tables import Row, to_json, to_markdown, to_parquet, write_tables
from jobs.storage import Storage


def row(method="gap", metric="auroc", value=0.7124, **other):
    known = {"level": "sentence", "task": "", "generator": "", "language": "", "n": 2000, "n_positive": 150}
    return Row(
        method=method, metric=metric, value=value, low=value - 0.02, high=value + 0.02, **known | other
    )


COMPARED = {"difference": 0.0412, "difference_low": -0.01, "difference_high": 0.0909, "against": "length"}
ROWS = [
    row("gap", **COMPARED),
    row("gap", "average_precision", 0.25),
    row("length", value=0.66),
    row("gap", level="token", n=300000, n_positive=15000),
    row("gap", level="response", task="QA", generator="mistral-7b", language="en"),
]


def test_json_holds_every_field_of_every_row_in_order():
    assert json.loads(to_json(ROWS)) == [asdict(one) for one in ROWS]
    assert json.loads(to_json([])) == []


def test_json_and_markdown_of_the_same_rows_are_the_same_bytes():
    again = [row("gap", **COMPARED), *ROWS[1:]]
    assert to_json(ROWS) == to_json(again)
    assert to_markdown(ROWS) == to_markdown(again)


def test_json_refuses_what_is_not_a_number():
    with pytest.raises(ValueError, match="JSON"):
        to_json([row(value=float("nan"))])


def test_parquet_has_the_columns_of_a_row_whether_or_not_there_are_rows():
    table = pq.read_table(pa.BufferReader(to_parquet(ROWS)))
    assert table.to_pylist() == [asdict(one) for one in ROWS]
    empty = pq.read_table(pa.BufferReader(to_parquet([])))
    assert empty.schema.equals(table.schema)
    assert empty.schema.names == [field.name for field in fields(Row)]
    assert [f.name for f in empty.schema if f.nullable] == [*COMPARED]


def test_markdown_has_a_table_per_level_fine_to_coarse_and_the_prevalence_above_it():
    text = to_markdown(ROWS)
    titles = [line for line in text.splitlines() if line.startswith("##")]
    assert titles == ["## Token level", "## Sentence level", "## Response level: QA, mistral-7b, en"]
    assert "300,000 tokens, 15,000 unsupported (prevalence .050)" in text
    assert "2,000 answers" in text


def test_markdown_has_a_line_per_method_and_a_column_per_metric():
    text = to_markdown(ROWS[:3])
    assert text.splitlines()[4:] == [
        "| method | AUROC | AP | AUROC above length |",
        "| --- | ---: | ---: | ---: |",
        "| gap | .712 [.692, .732] | .250 [.230, .270] | +.041 [-.010, +.091] |",
        "| length | .660 [.640, .680] |  |  |",
    ]


def test_markdown_shows_a_metric_that_it_has_no_heading_for():
    assert "| method | AUROC | precision at 10 |" in to_markdown([row(metric="precision at 10"), row()])


def test_a_perfect_figure_keeps_its_one_and_a_bar_in_a_name_does_not_cut_a_cell():
    text = to_markdown([row("a|b", value=1.0)])
    assert r"| a\|b | 1.000 [.980, 1.020] |" in text


def test_three_files_are_written_and_named_alike(tmp_path):
    urls = write_tables(Storage(), str(tmp_path / "out"), ROWS)
    assert [url.rsplit("/", 1)[-1] for url in urls] == [
        "evaluation.json",
        "evaluation.parquet",
        "evaluation.md",
    ]
    assert (tmp_path / "out/evaluation.json").read_bytes() == to_json(ROWS)
    assert (tmp_path / "out/evaluation.md").read_text() == to_markdown(ROWS)
    assert pq.read_table(tmp_path / "out/evaluation.parquet").num_rows == len(ROWS)
