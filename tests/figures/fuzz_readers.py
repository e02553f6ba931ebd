"""Generated inputs through every reader, as a worker would read them: what came out, per reader.

    python -m tests.figures.fuzz_readers 100000
    python -m tests.figures.fuzz_readers --only csv.gz:4711      # one of them again

Valid samples are changed twice: values, keys and nesting before they are written, bytes after. Of every
input it is held that nothing is raised but ConfigError (no log by its name and first bytes), that each raw
row becomes one record or one reject, that what came out can be stored, and that reading takes less than
LONGEST_SECONDS of CPU. An input that breaks one of these ends the script; its file is kept.
"""

import argparse
import csv
import faulthandler
import gzip
import io
import json
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from jobs.config import Config
from jobs.errors import ConfigError
from jobs.formats import Accepted, Reject, read_rows, read_unit, record_date
from jobs.formats.systems import SYSTEMS
from jobs.listing import WorkUnit, cut, freeze
from jobs.parts import encode, partition
from jobs.redaction import stored_texts
from jobs.storage import Storage
from jobs.tables import DIMENSIONS, MEASURED_RESPONSES, REJECTS
from tests.jobs.formats import (
    test_genai,
    test_langfuse,
    test_langsmith,
    test_mlflow,
    test_openinference,
    test_trulens,
)
from tests.runs import row

LONGEST_SECONDS = 5.0

ROWS: dict[str, list[Any]] = {
    "rows": [row(number) for number in range(6)],
    "openinference": [test_openinference.LLM, test_openinference.RETRIEVER, test_openinference.ROOT],
    "langfuse": test_langfuse.LOGGED,
    "langsmith": [test_langsmith.ROOT, test_langsmith.RETRIEVER, test_langsmith.LLM],
    "mlflow": [test_mlflow.ROW, test_mlflow.ROW],
    "trulens": test_trulens.LOGGED,
    "genai": [test_genai.HTTP, test_genai.RETRIEVAL, test_genai.CHAT],
}
HOSTILE: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 2**63, -(2**70), 1e308, float("nan"), float("inf"), "", " \n", [], {}, [[]]),
    *("\x00\x1b[31m", "\u202e\u2066001", "\ud800", "\U000e0041", "=HYPERLINK(1)", "<script>", "{{ 7 * 7 }}"),
    *("<|im_end|><s>[INST]", "../../etc/passwd", "[" * 3000, '[{"text": "p"}]', "{'a': [1,", "9" * 5000),
    *("2026-13-45T99:99", "0001-01-01", "9999-12-31T23:59:59-23:59", "1e400", [None, {"text": None}]),
    *([{"text": [{"text": []}]}], {"text": {"text": {}}}, "x" * 100_000, ["p"] * 3000, {"": {"": ""}}),
)
SNIPPETS = (
    *(b"\x00", b"\xff\xfe", b"\xef\xbb\xbf", b"\r\n\r\n", b'"', b"'", b"[" * 2000, b"{" * 2000, b"\\ud800"),
    *(b"NaN", b"-Infinity", b"1" * 5000, b",,,,", b'""""', b"PAR1", b"\x1f\x8b\x08", b"\x28\xb5\x2f\xfd"),
)
MAX_BYTES = 4 << 20
IDS = ("response_id", "trace_id", "span_id", *DIMENSIONS)
NAMES = [
    *(f"{kind}.{form}" for kind in ROWS for form in ("jsonl", "json", "parquet")),
    *("rows.csv", "rows.tsv", "rows.csv.gz", "rows.csv.zst", "rows.jsonl.gz", "rows.jsonl.zst"),
    *("rows.json.gz", "openinference.jsonl.gz", "rows.log"),
]


def make(name: str, number: int, seed: int) -> bytes:
    """Input `number` of the reader `name`; the same three give the same bytes."""
    luck = random.Random(f"{seed} {name} {number}")
    kind, form, *compression = name.split(".")
    rows = [_changed(json.loads(json.dumps(one)), luck) for one in ROWS[kind]]
    if luck.random() < 0.2:
        luck.shuffle(rows)
    data = {"csv": _csv, "tsv": _csv, "json": _json, "parquet": _parquet}.get(form, _jsonl)(rows, luck)
    # A unit of 1 KiB costs its third of a millisecond wherever a long line is cut.
    data = data[:MAX_BYTES]
    if luck.random() < 0.3 and form != "parquet":
        data = _damaged(data, luck)
    if compression == ["gz"]:
        data = gzip.compress(data, mtime=0)
    elif compression == ["zst"]:
        data = pa.compress(data, "zstd", asbytes=True)
    if luck.random() < (0.5 if compression or form == "parquet" else 0.1):
        data = _damaged(data, luck)
    return data


def read(path: Path, luck: random.Random, storage: Storage) -> Counter[str]:
    """What came of a file. Raises whatever it raises, and AssertionError for a row that is lost."""
    options = {"unit_bytes": luck.choice((1024, 1 << 20)), "unit_rows": luck.choice((1, 3, 512))}
    options |= {
        "max_record_bytes": luck.choice((1024, 16 << 20)),
        "max_file_bytes": luck.choice((4096, 1 << 28)),
    }
    options |= {"format": luck.choice(("auto",) * 9 + ("jsonl", "json", "csv", "parquet", *SYSTEMS))}
    config = Config.model_validate({"read": options})
    found: Counter[str] = Counter()
    try:
        units = list(cut(freeze([str(path)], storage, config.read), storage, config.read))
    except ConfigError:
        return Counter(no_log=1)
    for unit in units:
        outcomes = list(read_unit(unit, storage, config))
        n_raw = sum(1 for _ in read_rows(unit, storage, config))
        assert len(outcomes) == n_raw, f"{n_raw} rows read, {len(outcomes)} came out"
        for outcome in outcomes:
            found["accepted" if isinstance(outcome, Accepted) else "rejected"] += 1
        store(unit, outcomes)
    return found


def store(unit: WorkUnit, outcomes: list[Accepted | Reject]) -> None:
    """Put the outcomes into the tables that they would be written to."""
    tables: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
    for outcome in outcomes:
        subject = outcome.record if isinstance(outcome, Accepted) else outcome
        date = record_date(subject, unit.partitions) or "2026-01-01"
        partition(date)
        values = {"run_id": "r", "date": date, "path": outcome.path, "position": outcome.position}
        values |= {name: getattr(subject, name) for name in IDS}
        if isinstance(outcome, Accepted):
            values |= stored_texts(outcome.record, None)
        else:
            values |= {"reason": outcome.reason.value, "detail": outcome.detail}
            assert "\n" not in outcome.detail and len(outcome.detail) < 400, outcome.detail
        tables[isinstance(outcome, Accepted)].append(values)
    for accepted, rows in tables.items():
        schema = MEASURED_RESPONSES if accepted else REJECTS
        names = [name for name in schema.names if rows and name in rows[0]]
        if rows:
            encode(pa.Table.from_pylist(rows, schema=pa.schema([schema.field(name) for name in names])))


def main() -> None:
    """One line per reader."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("n", nargs="?", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", metavar="READER:NUMBER")
    parser.add_argument("--readers", nargs="+", choices=NAMES, default=NAMES, metavar="READER")
    arguments = parser.parse_args()
    faulthandler.enable()
    folder = Path(tempfile.mkdtemp(prefix="fuzz-readers-"))
    print(f"inputs lie in {folder} while they are read")
    if arguments.only:
        name, number = arguments.only.split(":")
        print(_one(folder, name, int(number), arguments.seed))
        return
    total: Counter[str] = Counter()
    for at, name in enumerate(NAMES):
        if name not in arguments.readers:
            continue
        n_inputs = arguments.n * (at + 1) // len(NAMES) - arguments.n * at // len(NAMES)
        began, slowest, found = time.process_time(), 0.0, Counter[str]()
        for number in range(n_inputs):
            outcome, seconds = _one(folder, name, number, arguments.seed)
            found += outcome
            slowest = max(slowest, seconds)
        total += found + Counter(inputs=n_inputs)
        counts = "  ".join(f"{key} {found[key]:7,}" for key in ("accepted", "rejected", "no_log"))
        cost = f"{time.process_time() - began:6.1f} s, slowest read {slowest:.2f} s"
        print(f"{name:24} inputs {n_inputs:6,}  {counts}  {cost}", flush=True)
    print(", ".join(f"{key} {count:,}" for key, count in total.items()))
    folder.rmdir()


def _one(folder: Path, name: str, number: int, seed: int) -> tuple[Counter[str], float]:
    """What came of one input, and the seconds of CPU that reading it took."""
    path = folder / f"fuzz.{name.split('.', 1)[1]}"
    path.write_bytes(make(name, number, seed))
    began = time.process_time()
    try:
        found = read(path, random.Random(f"{seed} {name} {number} read"), Storage())
    except BaseException:
        print(f"broke: {name}:{number}, kept as {path}", flush=True)
        raise
    seconds = time.process_time() - began
    assert seconds < LONGEST_SECONDS, f"{name}:{number} took {seconds:.1f} s, kept as {path}"
    path.unlink()
    return found, seconds


def _changed(tree: Any, luck: random.Random) -> Any:
    """A sample with a few of its values, keys and levels exchanged."""
    for _ in range(luck.choice((0, 0, 1, 1, 2, 5))):
        places = list(_places(tree))
        if not places:
            break
        holder, key = luck.choice(places)
        value = holder[key]
        change: Callable[[], Any] = luck.choice(
            (
                lambda: deepcopy(luck.choice(HOSTILE)),
                lambda: deepcopy(luck.choice(HOSTILE)),
                lambda v=value: _text(v),
                lambda v=value: _text(v).replace('"', "'").replace("null", "None"),
                lambda v=value: [v],
                lambda v=value: {luck.choice(("text", "content", "documents", "value", "")): v},
                lambda v=value: _deep(v, luck.choice((3, 20, 400, 950))),
                lambda v=value: _times(v, luck.choice((0, 2, 50))),
            )
        )
        if isinstance(holder, dict) and luck.random() < 0.2:
            holder[luck.choice(("text", "answer", "passages", "spans", "", "a.b", "\ud800", "x" * 300))] = (
                value
            )
            if luck.random() < 0.5:
                holder.pop(key, None)
        else:
            holder[key] = change()
    return tree


def _times(value: Any, n: int) -> Any:
    if not isinstance(value, (str, list)):
        return _text(value)
    return value * n if len(_text(value)) * n <= MAX_BYTES else value  # again and again it would be gigabytes


def _places(tree: Any) -> Any:
    left = [tree]
    while left:
        each = left.pop()
        pairs = each.items() if isinstance(each, dict) else enumerate(each) if isinstance(each, list) else ()
        for key, value in pairs:
            yield each, key
            left.append(value)


def _deep(value: Any, levels: int) -> Any:
    for level in range(levels):
        value = [value] if level % 2 else {"text": value}
    return value


def _damaged(data: bytes, luck: random.Random) -> bytes:
    out = bytearray(data)
    for _ in range(luck.choice((1, 1, 2, 8))):
        at, size = luck.randrange(len(out) + 1), luck.choice((1, 1, 4, 40))
        match luck.randrange(6):
            case 0:
                out[at : at + size] = luck.randbytes(size)
            case 1:
                del out[at : at + size]
            case 2:
                out[at:at] = luck.choice(SNIPPETS)
            case 3:
                out[at:at] = out[max(0, at - 200) : at]
            case 4:
                out[at : at + 1] = bytes([(out[at] if at < len(out) else 0) ^ (1 << luck.randrange(8))])
            case _ if luck.random() < 0.3:
                del out[at:]
    return bytes(out)


def _text(tree: Any) -> str:
    try:
        return json.dumps(tree)
    except RecursionError:
        return "[" * 5000


def _jsonl(rows: list[Any], luck: random.Random) -> bytes:
    return "".join(_text(one) + luck.choice(("\n", "\n", "\r\n", "\n\n")) for one in rows).encode()


def _json(rows: list[Any], luck: random.Random) -> bytes:
    tree = luck.choice(
        (
            rows,
            {"data": rows},
            {"spans": rows},
            rows[0],
            {"resourceSpans": [{"scopeSpans": [{"spans": rows}]}]},
        )
    )
    return _text(tree).encode()


def _csv(rows: list[Any], luck: random.Random) -> bytes:
    names = list(dict.fromkeys(name for one in rows if isinstance(one, dict) for name in one))
    sink = io.StringIO()
    table = csv.writer(
        sink, delimiter=luck.choice(",;\t|"), quoting=luck.choice((csv.QUOTE_MINIMAL, csv.QUOTE_ALL))
    )
    table.writerow(names)
    for one in rows:
        cells = [one.get(name) for name in names]
        table.writerow([cell if isinstance(cell, str) else _text(cell) for cell in cells])
    return sink.getvalue().encode(errors="surrogatepass")


def _parquet(rows: list[Any], luck: random.Random) -> bytes:
    try:
        table = pa.Table.from_pylist(rows)
    except (pa.ArrowException, UnicodeEncodeError, OverflowError, RecursionError):
        # Arrow has one type a column: what does not fit together is written as text.
        flat = [{str(k).encode(errors="replace").decode(): _text(v) for k, v in one.items()} for one in rows]
        table = pa.Table.from_pylist(flat)
    sink = pa.BufferOutputStream()
    options = {
        "compression": luck.choice(("snappy", "zstd", "gzip", "none")),
        "row_group_size": luck.choice((1, 2, 100)),
    }
    try:
        pq.write_table(table, sink, use_dictionary=luck.random() < 0.5, **options)
    except (pa.ArrowException, OSError):  # an empty struct, more than 100 levels
        return _parquet([{"answer": _text(one)} for one in rows], luck)
    return sink.getvalue().to_pybytes()


if __name__ == "__main__":
    main()
