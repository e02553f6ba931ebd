"""What a plan says of memory and windows, against the scorer that an audit would run."""

import json
import sys

import pytest

from detector import Record, Scorer
from detector.identity import fingerprint
from detector.memory import Extent, Sizes, predict_peak
from detector.prompts import read_record
from jobs.config import load_config
from jobs.plan import make_plan
from jobs.plan_needs import Needs, audit_keep, find_needs, scorer_folder
from jobs.storage import Storage
from tests import stand_in_head

STORAGE = Storage()
SHORT = Record("Who built it?", ["Ada built it.", "It is green."], "Ada built it in 1891.")
LONG = Record(
    "Who?", [f"Passage {i} tells about many things. " * 3 for i in range(12)], "Ada built it, and Bo did not."
)


@pytest.fixture
def settings(tiny_scorer_dir):
    """Settings with the tiny scorer."""
    return lambda *more: load_config(None, [f"scorer.name={tiny_scorer_dir}", *more], {})


def test_model_and_longest_record_are_what_the_scorer_takes(settings, tiny_scorer_dir):
    config = settings("workers.count=3", "loo=masked")
    needs = find_needs([SHORT, LONG, SHORT], config, STORAGE)
    scorer = Scorer.load(str(tiny_scorer_dir))
    reading = read_record(LONG, scorer.tokenizer, scorer.profile, scorer.window_tokens)
    keep = audit_keep(config, scorer.info, STORAGE)
    sizes = Sizes.of(scorer.model.config.to_dict(), "float32")
    assert needs.model_bytes == 4 * sum(p.numel() for p in scorer.model.parameters())
    assert needs.longest_tokens == len(reading.windows[0].full) + len(reading.answer_ids)
    assert needs.longest_bytes == predict_peak(sizes, Extent.of(reading), keep).n_bytes
    filled = Extent.of(reading).filled(2048)
    assert (needs.window_bytes, needs.window_tokens) == (predict_peak(sizes, filled, keep).n_bytes, 2048)
    assert (needs.n_records, needs.n_workers) == (3, 3)


@pytest.mark.parametrize("loo", ["exact", "masked", "off"])
def test_what_is_kept_is_what_an_audit_keeps(settings, tiny_scorer_dir, tmp_path, monkeypatch, loo):
    bundle = stand_in_head.bundle(fingerprint(str(tiny_scorer_dir)).fingerprint)
    bundle.save(tmp_path)
    monkeypatch.setitem(sys.modules, "detector.ensemble", stand_in_head)
    kept, trace = [], Scorer.trace
    monkeypatch.setattr(Scorer, "trace", lambda self, *given: kept.append(given[1]) or trace(self, *given))
    for place in ("none", str(tmp_path)):
        config = settings(f"loo='{loo}'", f"bundle={place}")
        loaded = Scorer.load(str(tiny_scorer_dir), bundle=None if place == "none" else bundle)
        loaded.measure(SHORT, leave_one_out=loo != "off", masked=loo == "masked")
        assert kept.pop() == audit_keep(config, loaded.info, STORAGE)


@pytest.mark.parametrize("loo", ["exact", "masked", "off"])
def test_windows_cost_what_they_compute_against_one_of_the_records_size(settings, tiny_scorer_dir, loo):
    config = settings("scorer.window_tokens=500", f"loo='{loo}'")
    needs = find_needs([SHORT, LONG], config, STORAGE)
    assert (needs.n_windowed, needs.n_records) == (1, 2)
    found = {}
    for window in (500, 2048):
        scorer = Scorer.load(str(tiny_scorer_dir), window_tokens=window)
        measured = scorer.measure(LONG, leave_one_out=loo != "off", masked=loo == "masked")
        found[window] = measured
    assert needs.most_windows == found[500].n_windows > found[2048].n_windows == 1
    assert needs.windowed_tokens == pytest.approx(found[500].n_computed_tokens, rel=0.02)
    assert needs.unwindowed_tokens == pytest.approx(found[2048].n_computed_tokens, rel=0.02)


def test_lines_name_model_record_window_workers_and_windows():
    needs = Needs(
        120, 538_060_032, 187_000_000, 2230, 610_000_000, 8192, 2, 3, 4, 41_000, 20_000, "cpu", "exact", ()
    )
    memory, windows = needs.to_lines()
    assert memory == (
        "memory: model 538 MB + up to 187 MB per worker for the longest record of the sample (2,230 tokens), "
        "up to 610 MB for one that fills the window (8,192 tokens); 2 workers: 2,296 MB, beside Python and "
        "its libraries"
    )
    assert windows == (
        "windows: 3 of 120 records need more than one (up to 4); they take 41,000 computed tokens, 2.05 "
        "times those of one window of their size"
    )


def test_packs_are_told_where_workers_have_a_gpu(settings):
    assert find_needs([SHORT], settings(), STORAGE).pack_bytes is None
    needs = find_needs([SHORT], settings("workers.device=gpu"), STORAGE)
    assert needs.device == "cuda" and needs.pack_bytes > 1 << 20
    said = f"run in packs of up to {needs.pack_bytes / 1e6:,.0f} MB, or of half of the memory that is free"
    assert said in needs.to_lines()[0]


def test_workers_are_one_a_core_that_they_may_use_and_unknown_on_a_cluster(settings, monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    device = "scorer.device=cpu"
    assert find_needs([SHORT], settings(device), STORAGE).n_workers == 8
    assert find_needs([SHORT], settings(device, "workers.cpus_per_worker=3"), STORAGE).n_workers == 2
    remote = find_needs([SHORT], settings(device, "workers.address=ray://head:10001"), STORAGE)
    assert remote.n_workers is None and "worker:" not in remote.to_lines()[0]


def test_a_plan_prints_the_lines_and_their_numbers_as_json(settings, tmp_path):
    row = {"question": "Who?", "contexts": ["Ada built it."], "answer": "Ada."}
    (tmp_path / "a.jsonl").write_text(json.dumps(row) + "\n")
    plan = make_plan([str(tmp_path)], settings())
    assert all(f"  {line}" in plan.to_text().splitlines() for line in plan.needs.to_lines())
    assert "windows: every record that can be read fits one of 2,048 tokens" in plan.to_text()
    tree = json.loads(plan.to_json())
    assert tree["needs"]["longest_bytes"] == plan.needs.longest_bytes and tree["needs_unknown"] is None


def test_a_scorer_that_is_not_here_is_not_fetched_and_the_plan_goes_on(tmp_path):
    row = {"question": "Who?", "contexts": ["Ada built it."], "answer": "Ada."}
    (tmp_path / "a.jsonl").write_text(json.dumps(row) + "\n")
    cache = f"scorer.cache_dir={tmp_path / 'cache'}"
    for name in ("smollm2-135m", "nobody/none"):
        plan = make_plan([str(tmp_path / "a.jsonl")], load_config(None, [f"scorer.name={name}", cache], {}))
        assert plan.n_accepted == 1 and plan.needs is None
        assert f"  memory: not known; scorer {name}: not on this machine yet" in plan.to_text()
    assert not (tmp_path / "cache").exists()


def test_a_gguf_file_is_not_converted(tmp_path):
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    config = load_config(None, [f"scorer.name={file}"], {})
    assert "GGUF" in find_needs([SHORT], config, STORAGE)
    assert list(tmp_path.iterdir()) == [file]


def test_records_that_cannot_be_read_leave_nothing_to_tell(settings):
    assert "none of the sample" in find_needs([Record("Who?", [" "], "Ada.")], settings(), STORAGE)


def test_settings_that_an_audit_would_refuse_are_told(settings):
    told = find_needs([SHORT], settings("bundle=/nowhere/at/all"), STORAGE)
    assert "/nowhere/at/all" in told and "\n" not in told


def test_a_local_folder_is_the_scorers_own(settings, tiny_scorer_dir):
    assert scorer_folder(settings()) == tiny_scorer_dir
