"""What an evaluation found, as rows: JSON and Parquet for programs, a markdown table per level for people."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import groupby
from typing import Any

from jobs.storage import Storage, join

LEVELS = ("token", "sentence", "response", "character")
"""The order of the tables, fine to coarse."""

METRIC_NAMES = {
    "auroc": "AUROC",
    "average_precision": "AP",
    "f1": "F1",
    "iou": "character IoU",
    "span_f1": "span F1",
}
"""Metrics of `detector.evaluation` -> how a table heads them, in the order of the columns."""


@dataclass(frozen=True, slots=True)
class Row:
    """One figure of one method on one group of labelled rows.

    `task`, `generator` and `language` are "" where all are pooled. `n` rows of the level (tokens, sentences,
    answers), `n_positive` of them unsupported. `low` and `high` bound 95 % of the resamples, `difference` is
    the figure above that of the method `against` in the same ones; None where no baseline was named.
    """

    method: str
    level: str
    metric: str
    task: str
    generator: str
    language: str
    n: int
    n_positive: int
    value: float
    low: float
    high: float
    difference: float | None = None
    difference_low: float | None = None
    difference_high: float | None = None
    against: str | None = None


def to_json(rows: Sequence[Any]) -> bytes:
    """A list of objects, one row a line, in the order given; the same rows give the same bytes.

    `rows` are dataclasses. Raises ValueError for NaN and infinity, which JSON does not know.
    """
    lines = ",\n".join(json.dumps(asdict(row), ensure_ascii=False, allow_nan=False) for row in rows)
    return f"[\n{lines}\n]\n".encode()


def to_parquet(rows: Sequence[Any], kind: type = Row) -> bytes:
    """A Parquet file with the columns of the dataclass `kind`, also without any row."""
    import pyarrow as pa

    from jobs.parts import encode

    columns = {"str": pa.string(), "int": pa.int64(), "float": pa.float64(), "bool": pa.bool_()}
    schema = pa.schema(
        [
            pa.field(column.name, columns[_type_name(column.type)], nullable="None" in str(column.type))
            for column in fields(kind)
        ]
    )
    return encode(pa.Table.from_pylist([asdict(row) for row in rows], schema=schema))


def to_markdown(rows: Sequence[Row]) -> str:
    """One table per level and group: a line per method, a column per metric, cells `value [low, high]`.

    Methods keep the order of their first row; of differences, those of the first metric that has one are
    shown, because a table that wide is not read. The prevalence, chance level of the average precision,
    stands in the caption.
    """
    tables = []
    ordered = sorted(rows, key=lambda row: (LEVELS.index(row.level), _group(row)))
    for (level, group), members in groupby(ordered, key=lambda row: (row.level, _group(row))):
        tables.append(_table(level, group, list(members)))
    return "\n".join(tables)


def write_tables(storage: Storage, out: str, rows: Sequence[Row], name: str = "evaluation") -> list[str]:
    """Write OUT/<name>.json, .parquet and .md, each in one put. Returns their URLs."""
    return put_files(
        storage,
        out,
        name,
        {"json": to_json(rows), "parquet": to_parquet(rows), "md": to_markdown(rows).encode()},
    )


def put_files(storage: Storage, out: str, name: str, files: dict[str, bytes]) -> list[str]:
    """Write OUT/<name>.<extension> for each extension. Returns the URLs in that order."""
    urls = []
    for extension, data in files.items():
        urls.append(join(out, f"{name}.{extension}"))
        storage.write(urls[-1], data)
    return urls


def table_lines(heads: Sequence[str], lines: Iterable[Sequence[str]]) -> list[str]:
    """A markdown table; every column but the first is aligned right."""
    rule = ["---", *["---:"] * (len(heads) - 1)]
    escaped = ([text.replace("|", r"\|") for text in line] for line in (heads, rule, *lines))
    return [f"| {' | '.join(line)} |" for line in escaped]


def cell(value: float, low: float, high: float, *, sign: bool = False) -> str:
    """`.712 [.690, .731]`, with `sign` `+.041 [+.020, +.063]`: three digits, no zero before the point."""
    middle, *ends = (_short(number, sign=sign) for number in (value, low, high))
    return f"{middle} [{', '.join(ends)}]"


def _table(level: str, group: tuple[str, ...], rows: list[Row]) -> str:
    found_metrics = dict.fromkeys(row.metric for row in rows)
    metrics = [m for m in METRIC_NAMES if m in found_metrics] + [
        m for m in found_metrics if m not in METRIC_NAMES
    ]
    cells = {(row.method, row.metric): row for row in rows}
    compared = next((m for m in metrics if any(r.metric == m and r.against for r in rows)), None)
    heads = ["method", *(METRIC_NAMES.get(metric, metric) for metric in metrics)]
    if compared:
        against = next(row.against for row in rows if row.against)
        heads.append(f"{METRIC_NAMES.get(compared, compared)} above {against}")
    lines = []
    for method in dict.fromkeys(row.method for row in rows):
        found = [cells.get((method, metric)) for metric in metrics]
        line = [method, *(cell(row.value, row.low, row.high) if row else "" for row in found)]
        if compared:
            line.append(_difference(cells.get((method, compared))))
        lines.append(line)
    # IoU and span F1 may count answers where the ranking metrics count tokens.
    shown = next(row for row in rows if row.metric == metrics[0])
    prevalence = shown.n_positive / shown.n if shown.n else 0.0
    where = ", ".join(part for part in group if part)
    counted = level if level in ("token", "sentence") else "answer"
    caption = (
        f"{shown.n:,} {counted}s, {shown.n_positive:,} unsupported "
        f"(prevalence {_short(prevalence)}); 95 % intervals, whole sources resampled."
    )
    title = f"## {level.capitalize()} level" + (f": {where}" if where else "")
    return "\n".join([title, "", caption, "", *table_lines(heads, lines), ""])


def _difference(row: Row | None) -> str:
    if row is None or row.difference is None or row.difference_low is None or row.difference_high is None:
        return ""
    return cell(row.difference, row.difference_low, row.difference_high, sign=True)


def _group(row: Row) -> tuple[str, ...]:
    return (row.task, row.generator, row.language)


def _short(number: float, *, sign: bool = False) -> str:
    text = f"{number:+.3f}" if sign else f"{number:.3f}"
    return text.replace("0.", ".", 1) if abs(number) < 0.9995 else text


def _type_name(annotation: Any) -> str:
    name = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))
    return name.split(" | ")[0]
