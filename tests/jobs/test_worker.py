"""One unit in a worker: what becomes a row, what becomes a reject, and in which order it is written."""

import sys
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, astuple, replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import jobs.formats
import jobs.worker
from detector.errors import RecordRejected, RejectReason
from detector.identity import fingerprint
from jobs.bundles import remember
from jobs.commit import create_run, read_markers, write_marker
from jobs.config import Config
from jobs.errors import JobError
from jobs.formats import read_unit
from jobs.listing import cut, freeze
from jobs.storage import Storage
from jobs.tables import MEASURED_RESPONSES, MEASURED_SENTENCES, READINGS, REJECTS, VERDICT
from jobs.worker import PACK_ROWS, DeviceLost, Worker, load_scorer
from tests import fake_scorer, stand_in_head
from tests.fake_scorer import FakeScorer
from tests.runs import record, row, write_rows

STORAGE = Storage()
SCHEMAS = {"responses": MEASURED_RESPONSES, "sentences": MEASURED_SENTENCES, "rejects": REJECTS}


class Bench:
    """A run of one unit on local files."""

    def __init__(self, folder, rows, config=None, scorer=None):
        self.config = config or Config()
        self.out = str(folder / "out")
        logs = [write_rows(folder / "logs.jsonl", rows)]
        files = freeze(logs, STORAGE, self.config.read)
        (self.unit,) = cut(files, STORAGE, self.config.read)
        self.run = create_run(
            STORAGE,
            self.out,
            logs,
            self.config,
            fake_scorer.identify(self.config),
            [asdict(file) for file in files],
            1,
        )
        self.worker = Worker(self.out, self.config, self.run, lambda _: scorer or FakeScorer())

    def audit(self, attempt=1):
        return self.worker.audit_unit(self.unit.to_json(), attempt)

    def rows(self, marker, kind):
        parts = [part for part in marker["parts"] if part["table"] == kind]
        tables = [pq.read_table(f"{self.out}/{part['url_suffix']}", partitioning=None) for part in parts]
        assert all(table.schema.equals(SCHEMAS[kind]) for table in tables)
        return pa.concat_tables([SCHEMAS[kind].empty_table(), *tables]).to_pylist()


def failing(error):
    """A scorer whose every measurement raises `error`."""
    scorer = FakeScorer()
    scorer.measure = lambda *_, **__: (_ for _ in ()).throw(error)
    return scorer


def test_spans_of_traces_that_are_no_rows_are_counted_in_the_marker(tmp_path):
    span = {"context": {"trace_id": "t", "span_id": "s"}, "parent_id": None, "name": "cron"}
    kind = {"openinference.span.kind": "TOOL", "input.value": "x"}
    marker = Bench(tmp_path, [span | {"span_kind": "TOOL", "attributes": kind}]).audit()
    assert (marker["n_read"], marker["n_other_spans"]) == (0, 1)


def test_every_row_read_is_a_response_or_a_reject(tmp_path):
    bench = Bench(tmp_path, [row(0), row(1, passages=[]), "{half", row(2)])
    marker = bench.audit()
    assert (marker["n_read"], marker["n_audited"], marker["n_rejected"]) == (4, 2, 2)
    assert marker["rejects"] == {"no_passages": 1, "malformed_row": 1}
    assert [r["response_id"] for r in bench.rows(marker, "responses")] == ["r0", "r2"]
    rejects = bench.rows(marker, "rejects")
    assert {(r["reason"], r["response_id"]) for r in rejects} == {
        ("no_passages", "r1"),
        ("malformed_row", None),
    }
    assert all(r["detail"] and r["path"].endswith("logs.jsonl") for r in rejects)


def tables_of(bench, marker):
    return {kind: bench.rows(marker, kind) for kind in SCHEMAS}


def test_packs_change_neither_rows_nor_their_order(tmp_path):
    rows = [
        row(0),
        row(1, passages=[]),
        *(row(i) for i in range(2, 90)),
        "{half",
        row(90, answer="raise here"),
    ]
    found = []
    for packed in (False, True):
        (folder := tmp_path / str(packed)).mkdir()
        bench = Bench(folder, rows, scorer=FakeScorer(packed=packed))
        marker = bench.audit()
        assert (marker["n_read"], marker["n_audited"]) == (92, 89)
        found.append(tables_of(bench, marker))
    for kind in SCHEMAS:
        for one, other in zip(*(tables[kind] for tables in found), strict=True):
            assert {**one, "run_id": 0, "path": 0} == {**other, "run_id": 0, "path": 0}


def test_packs_are_given_in_batches_without_rows_that_kill_or_that_nobody_asked_for(tmp_path):
    asked, scorer = [], FakeScorer(packed=True)
    measure_many = scorer.measure_many

    def remember(records, **how):
        asked.append([one.response_id for one in records])
        return measure_many(records, **how)

    scorer.measure_many = remember
    bench = Bench(tmp_path, [row(i) for i in range(PACK_ROWS + 3)], scorer=scorer)
    marker = bench.worker.audit_unit(bench.unit.to_json(), aside=[1])
    assert marker["rejects"] == {"scoring_failed": 1}
    assert asked == [[f"r{i}" for i in range(PACK_ROWS) if i != 1], [f"r{PACK_ROWS + i}" for i in range(3)]]
    asked.clear()
    assert bench.worker.probe_unit(bench.unit.to_json(), (4, 6)) == PACK_ROWS + 3
    assert asked == [["r4", "r5"]]


def test_a_lost_device_is_not_blamed_on_a_pack(tmp_path):
    scorer = FakeScorer(packed=True)
    scorer.measure_many = lambda *_, **__: (_ for _ in ()).throw(torch.AcceleratorError("lost"))
    with pytest.raises(DeviceLost):
        Bench(tmp_path, [row(0), row(1)], scorer=scorer).audit()


def test_rows_hold_what_was_logged_and_what_was_measured(tmp_path):
    bench = Bench(tmp_path, [row(0)])
    marker = bench.audit()
    (response,), sentences = bench.rows(marker, "responses"), bench.rows(marker, "sentences")
    measured = FakeScorer().measure(record(row(0)))
    assert response["run_id"] == bench.run.run_id
    assert response["date"] == "2026-10-01" and response["app"] == "desk"
    assert response["answer"] == row(0)["answer"] and response["question"] == row(0)["question"]
    assert [p["id"] for p in response["passages"]] == ["p0a", "p0b"]
    assert response["drops"] == pytest.approx(measured.features.drops, rel=1e-6)
    assert response["n_sentences"] == len(sentences) == 2
    assert response["n_computed_tokens"] == marker["n_tokens"] == measured.n_computed_tokens
    for got, want in zip(sentences, measured.sentences, strict=True):
        assert (got["record_index"], got["sentence_index"]) == (response["record_index"], want.index)
        assert (got["start"], got["end"], got["n_tokens"]) == (want.start, want.end, want.n_tokens)
        assert got["gap"] == pytest.approx(want.features.gap, rel=1e-6)
        assert got["max_drop"] == pytest.approx(want.features.max_drop, rel=1e-6)
        for name in READINGS:
            assert got[name] == pytest.approx(getattr(want.features, name), rel=1e-6)
        assert got["evidence_passage_index"] == want.evidence.passage_index
        assert got["evidence_passage_id"] == ("p0a", "p0b")[want.evidence.passage_index]
        assert (got["evidence_start"], got["evidence_end"]) == (want.evidence.start, want.evidence.end)


def test_sentences_join_to_their_response_across_dates(tmp_path):
    bench = Bench(tmp_path, [row(0), row(1), row(2), row(3)])
    marker = bench.audit()
    owners = {r["record_index"]: r for r in bench.rows(marker, "responses")}
    assert len({r["date"] for r in owners.values()}) == 3
    for sentence in bench.rows(marker, "sentences"):
        answer = owners[sentence["record_index"]]["answer"]
        assert answer[sentence["start"] : sentence["end"]] in answer.split(". ")


def test_a_record_without_a_date_gets_the_day_of_the_run(tmp_path):
    bench = Bench(tmp_path, [row(0, timestamp=None)])
    (response,) = bench.rows(bench.audit(), "responses")
    assert response["date"] == bench.run.date


def test_two_attempts_write_the_same_parts(tmp_path):
    bench = Bench(tmp_path, [row(0), row(1), "{half"])
    first, second = bench.audit(1), bench.audit(2)
    assert first["parts"] == second["parts"]
    assert second == first and second["attempt"] == 1  # the marker that stands is the first one's
    assert read_markers(STORAGE, bench.out) == {bench.unit.unit_id: second}


def test_the_marker_is_written_when_every_part_is(tmp_path, monkeypatch):
    bench = Bench(tmp_path, [row(0), row(1), "{half"])
    begun, written = [], []
    for name in ("write", "create"):
        original = getattr(Storage, name)

        def put(self, url, data, original=original):
            begun.append((url, len(written)))
            done = original(self, url, data)
            written.append(url)
            return done

        monkeypatch.setattr(Storage, name, put)
    marker = bench.audit()
    parts = {f"{bench.out}/{part['url_suffix']}" for part in marker["parts"]}
    assert set(written[:-1]) == parts
    assert begun[-1] == (f"{bench.out}/units/{bench.unit.unit_id}.json", len(parts))


def test_a_log_that_changed_under_the_run_is_not_read(tmp_path):
    bench = Bench(tmp_path, [row(0)])
    write_rows(tmp_path / "logs.jsonl", [row(1), row(2)])
    with pytest.raises(JobError, match=r"logs\.jsonl: changed"):
        bench.audit()
    assert read_markers(STORAGE, bench.out) == {}


@pytest.mark.parametrize("n_written", [0, 1, 2])
def test_a_storage_error_leaves_no_marker(tmp_path, monkeypatch, n_written):
    bench = Bench(tmp_path, [row(0), row(1), "{half"])
    left = iter(range(n_written))
    write = Storage.write

    def write_or_fail(self, url, data):
        if next(left, None) is None:
            raise OSError("503 SlowDown")
        write(self, url, data)

    monkeypatch.setattr(Storage, "write", write_or_fail)
    with pytest.raises(OSError, match="SlowDown"):
        bench.audit()
    assert read_markers(STORAGE, bench.out) == {}


def test_a_record_that_cannot_be_measured_is_a_reject_that_quotes_nothing(tmp_path):
    bench = Bench(tmp_path, [row(0), row(1, answer="raise here, secret words"), row(2)])
    marker = bench.audit()
    (reject,) = bench.rows(marker, "rejects")
    assert (reject["reason"], reject["response_id"]) == ("scoring_failed", "r1")
    assert reject["detail"].startswith("ValueError") and "secret" not in reject["detail"]
    assert marker["n_audited"] == 2


def test_the_detectors_own_rejection_keeps_its_reason(tmp_path):
    error = RecordRejected(RejectReason.OVER_WINDOW, "9,000 tokens")
    bench = Bench(tmp_path, [row(0)], scorer=failing(error))
    (reject,) = bench.rows(bench.audit(), "rejects")
    assert (reject["reason"], reject["detail"]) == ("over_window", "9,000 tokens")


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("data. DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."),
        MemoryError(),
    ],
    ids=["device", "torch", "numpy"],
)
def test_a_record_that_memory_does_not_hold_is_a_reject(tmp_path, error):
    bench = Bench(tmp_path, [row(0)], scorer=failing(error))
    (reject,) = bench.rows(bench.audit(), "rejects")
    assert reject["reason"] == "scoring_failed"
    assert reject["detail"] == "the device's memory does not hold this record"


def test_a_lost_device_is_not_blamed_on_the_record(tmp_path):
    bench = Bench(tmp_path, [row(0)], scorer=failing(torch.AcceleratorError("illegal memory access")))
    with pytest.raises(DeviceLost):
        bench.audit()
    assert read_markers(STORAGE, bench.out) == {}


def bundled(tmp_path, bundle, scorer_bundle):
    """A run that began with one bundle, in a worker that has another."""
    bench = Bench(tmp_path, [row(0), row(1, answer="One.")])
    run = replace(bench.run, scorer=bench.run.scorer | remember(bundle))
    scorer = FakeScorer(bundle=scorer_bundle)
    bench.worker = Worker(bench.out, bench.config, run, lambda _: scorer)
    return bench, scorer


def test_rows_that_kill_are_rejects_and_are_not_measured(tmp_path):
    rows = [row(0), row(1, answer="die here"), row(2)]
    bench = Bench(tmp_path, rows)
    marker = bench.worker.audit_unit(bench.unit.to_json(), 3, (1,))
    (reject,) = bench.rows(marker, "rejects")
    assert (reject["reason"], reject["response_id"]) == ("scoring_failed", "r1")
    assert "ends the worker's process" in reject["detail"] and marker["n_audited"] == 2


def test_a_probe_measures_its_rows_alone_and_writes_nothing(tmp_path):
    scorer, seen = FakeScorer(), []
    measure = scorer.measure
    scorer.measure = lambda record, **how: (seen.append(record.question), measure(record, **how))[1]
    bench = Bench(tmp_path, [row(0), "{half", row(2), row(3)], scorer=scorer)
    assert bench.worker.probe_unit(bench.unit.to_json(), (1, 3)) == 4
    assert seen == [row(2)["question"]]
    assert bench.worker.probe_unit(bench.unit.to_json(), (0, 0)) == 4
    assert [found.url for found in STORAGE.list(bench.out)] == [f"{bench.out}/run.json"]


def test_the_time_of_a_unit_is_told_by_stage(tmp_path):
    bench, seconds = Bench(tmp_path, [row(0), row(1)], scorer=FakeScorer(seconds=0.05)), Counter()
    marker = bench.worker.audit_unit(bench.unit.to_json(), seconds=seconds)
    assert seconds.keys() == {"read", "measure", "write"}
    assert seconds["measure"] >= 0.1
    # What the device was held: the parts are written while it has another unit.
    assert marker["seconds"] == pytest.approx(seconds["read"] + seconds["measure"], abs=1e-3)


def watched(monkeypatch, *, before_marker=None, before_measure=None):
    """A scorer that notes the threads it ran in, and events: two rows measured, two units read."""
    threads, measured, opened = [], threading.Event(), threading.Event()
    scorer, measure = FakeScorer(), FakeScorer().measure
    n_units = iter(range(9))

    def note_and_measure(record, **how):
        threads.append(threading.current_thread())
        if len(threads) == 2:
            measured.set()
        assert before_measure is None or opened.wait(20)
        return measure(record, **how)

    def write(*arguments):
        assert before_marker is None or measured.wait(20)
        return write_marker(*arguments)

    def read(*arguments):
        yield from read_unit(*arguments)
        if next(n_units) == 1:
            opened.set()

    scorer.measure = note_and_measure
    monkeypatch.setattr(jobs.worker, "write_marker", write)
    monkeypatch.setattr(jobs.formats, "read_unit", read)
    return scorer, threads


@pytest.mark.parametrize("awaited", ["before_marker", "before_measure"])
def test_of_two_units_one_is_measured_while_the_other_is_written_or_read(tmp_path, monkeypatch, awaited):
    """The first marker waits for a measurement of the second unit, or the first measurement for its rows."""
    scorer, threads = watched(monkeypatch, **{awaited: True})
    bench = Bench(tmp_path, [row(0)], scorer=scorer)
    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(bench.audit, (1, 1))
    assert one["parts"] == other["parts"] and one["n_audited"] == 1
    assert len(threads) == 2 and len(set(threads)) == 1
    assert threads[0] is not threading.main_thread()


def test_verdicts_become_columns_of_sentences_and_the_rules_of_answers(tmp_path):
    bundle = stand_in_head.bundle(fake_scorer.FINGERPRINT)
    bench, scorer = bundled(tmp_path, bundle, bundle)
    marker = bench.audit()
    measured = [scorer.measure(record(one)) for one in (row(0), row(1, answer="One."))]
    sentences = [sentence for one in measured for sentence in one.sentences]
    for got, want in zip(bench.rows(marker, "sentences"), sentences, strict=True):
        assert [got[name] for name in VERDICT] == pytest.approx(astuple(want.verdict), rel=1e-6)
    found = [got["ensemble"] for got in bench.rows(marker, "responses")]
    assert found == pytest.approx([one.ensemble for one in measured], rel=1e-6)


def test_without_a_bundle_the_columns_of_verdicts_are_empty(tmp_path):
    bench = Bench(tmp_path, [row(0)])
    marker = bench.audit()
    assert [r["ensemble"] for r in bench.rows(marker, "responses")] == [None]
    assert {got[name] for got in bench.rows(marker, "sentences") for name in VERDICT} == {None}


@pytest.mark.parametrize("has", [True, False])
def test_another_bundle_than_the_runs_is_refused(tmp_path, has):
    bundle = stand_in_head.bundle(fake_scorer.FINGERPRINT)
    other = stand_in_head.bundle(fake_scorer.FINGERPRINT, seed=1)
    with pytest.raises(JobError, match=rf"bundle auto: here it is .*, when the run began .*{bundle.digest}"):
        bundled(tmp_path, bundle, other if has else None)


def test_the_real_scorer_takes_the_bundle_that_the_settings_name(tiny_scorer_dir, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "detector.ensemble", stand_in_head)
    bundle = stand_in_head.bundle(fingerprint(str(tiny_scorer_dir)).fingerprint)
    bundle.save(tmp_path / "b")
    before = torch.get_num_threads()
    try:
        for place, wanted in ((str(tmp_path / "b"), bundle.digest), ("auto", None), ("none", None)):
            config = Config.model_validate({"scorer": {"name": str(tiny_scorer_dir)}, "bundle": place})
            loaded = load_scorer(config.resolved(wanted, reads_attention=True))
            assert (loaded.bundle and loaded.bundle.digest) == wanted
    finally:
        torch.set_num_threads(before)


def test_store_text_none_keeps_no_text_of_the_log(tmp_path):
    bench = Bench(tmp_path, [row(0)], Config(store_text="none"))
    marker = bench.audit()
    (response,) = bench.rows(marker, "responses")
    assert (response["question"], response["answer"], response["passages"]) == (None, None, None)
    for part in marker["parts"]:
        content = pq.read_table(f"{bench.out}/{part['url_suffix']}", partitioning=None).to_pylist()
        assert "shelf" not in str(content).lower()


def test_leave_one_out_off_leaves_its_columns_empty(tmp_path):
    config = Config(loo="off")
    bench = Bench(tmp_path, [row(0)], config)
    marker = bench.audit()
    for got in bench.rows(marker, "sentences"):
        assert got["drops"] == [] and got["max_drop"] is None and got["evidence_passage_index"] is None


@pytest.mark.parametrize(
    ("loo", "asked"), [("exact", (True, False)), ("masked", (True, True)), ("off", (False, False))]
)
def test_the_setting_loo_says_how_pieces_are_left_out(tmp_path, loo, asked):
    scorer, seen = FakeScorer(), []
    measure = scorer.measure
    scorer.measure = lambda *record, **how: (
        seen.append((how["leave_one_out"], how["masked"])) or measure(*record, **how)
    )
    Bench(tmp_path, [row(0)], Config(loo=loo), scorer).audit()
    assert seen == [asked]


def test_short_answers_are_rejected_by_the_runs_minimum(tmp_path):
    config = Config.model_validate({"read": {"min_answer_tokens": 5}})
    bench = Bench(tmp_path, [row(0, answer="Too short."), row(1)], config)
    assert bench.audit()["rejects"] == {"answer_too_short": 1}


def test_other_weights_under_the_same_name_are_refused(tmp_path):
    bench = Bench(tmp_path, [row(0)])
    with pytest.raises(JobError, match="not those that"):
        Worker(bench.out, bench.config, bench.run, lambda _: replace(FakeScorer(), fingerprint="other"))


def test_the_real_scorer_computes_with_the_threads_that_the_settings_say(tiny_scorer_dir):
    before = torch.get_num_threads()
    tree = {"scorer": {"name": str(tiny_scorer_dir)}, "workers": {"cpus_per_worker": 2}}
    try:
        assert load_scorer(Config.model_validate(tree)).dtype == "float32"
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
