"""`leadline bench` on a tiny scorer: what is counted, what is compared, what is refused. Never how fast."""

import json
import shutil
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from detector import passes
from detector.scorer import Scorer
from detector.vocabulary import Head
from jobs import cli
from jobs.bench import show
from jobs.bench_cases import Ask, Growth, bench, generated
from jobs.bench_meters import PARTS, extra_peak_bytes, shares_of_time, time_rounds
from jobs.bench_peers import PEERS, ScorerSpec, keep_of, largest_difference, reader
from jobs.bench_shapes import Shape
from jobs.errors import JobError
from tests.runs import row, write_rows
from tests.test_layout import BROUGHT_BY_TRANSFORMERS, NOT_FOR_THE_DETECTOR, run_python

SHAPE = Shape(150, 40, 3)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def spec(tiny_scorer_dir):
    return ScorerSpec(str(tiny_scorer_dir))


@pytest.fixture(scope="module")
def scorer(spec):
    return spec.load()


@pytest.fixture(scope="module")
def case(scorer):
    return generated(SHAPE, 2, scorer)


@pytest.fixture(scope="module")
def found(spec, scorer, case):
    """Everything but memory, which takes a process for each."""
    ask = Ask(
        (SHAPE,),
        ("exact", "masked", "off"),
        ("reference", "separate", "padded"),
        n_answers=1,
        repeats=2,
        growth=(Growth("passages", (2, 4)), Growth("answers", (1, 2))),
        memory=False,
    )
    return bench(ask, spec, scorer, [case])


@pytest.fixture
def leadline(monkeypatch, capsys):
    def run(*words):
        monkeypatch.setattr(sys, "argv", ["leadline", "bench", *map(str, words)])
        code = cli.main()
        printed = capsys.readouterr()
        return SimpleNamespace(code=code, out=printed.out, err=printed.err)

    return run


def contender(found, name):
    return next(one for one in found["cases"][0]["contenders"] if one["name"] == name)


@pytest.mark.parametrize("loo", ["exact", "masked", "off"])
def test_computed_tokens_are_those_of_the_traces_and_equal_the_floor(found, scorer, case, loo):
    traces = [trace for record in case.records for trace in scorer.trace(record, keep_of(loo))[1]]
    measured = contender(found, loo)
    assert measured["computed_tokens"] == sum(trace.n_computed_tokens for trace in traces)
    assert measured["computed_tokens"] == measured["floor_tokens"]
    assert measured["tokens_over_floor"] == 1.0


@pytest.mark.parametrize("name", ["reference", "separate", "padded"])
def test_plain_passes_give_the_numbers_of_exact(found, name):
    difference = contender(found, name)["difference_from_exact_nats"]
    assert set(difference) == {"logprob", "jsd"}
    assert max(difference.values()) < 1e-4


def test_plain_passes_compute_what_they_must_and_the_padded_batch_its_padding_too(found, scorer, case):
    prompts = [
        [window.full, window.none, *window.without]
        for record in case.records
        for window in scorer.trace(record)[0].windows
    ]
    lengths = [[len(prompt) + SHAPE.answer_tokens for prompt in conditions] for conditions in prompts]
    assert contender(found, "separate")["computed_tokens"] == sum(map(sum, lengths))
    assert contender(found, "reference")["computed_tokens"] == sum(map(sum, lengths))
    assert contender(found, "padded")["computed_tokens"] == sum(max(own) * len(own) for own in lengths)


def test_plain_passes_leave_the_scorer_as_it_was(found, scorer):
    assert scorer.model.config._attn_implementation == "leadline"
    assert torch.is_grad_enabled()


def test_the_tree_is_json_with_units_spreads_and_no_holes(found):
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert set(found) == {"machine", "versions", "scorer", "repeats", "cases", "growth"}
    assert {"cpu", "cores", "threads", "gpu"} == set(found["machine"])
    assert found["versions"]["torch"] == torch.__version__
    assert {"fingerprint", "dtype", "profile", "size"} <= set(found["scorer"])
    (case,) = found["cases"]
    assert (case["mean_context_tokens"], case["mean_answer_tokens"], case["mean_pieces"]) == (150, 40, 3)
    assert [one["name"] for one in case["contenders"]] == [
        "exact", "masked", "off", "reference", "separate", "padded",
    ]  # fmt: skip
    for one in case["contenders"]:
        assert len(one["seconds"]) == 2
        spread = one["seconds_per_answer"]
        assert spread["min"] <= spread["median"] <= spread["max"]
    pairs = {(ratio["mode"], ratio["peer"]) for ratio in case["ratios"]}
    assert len(pairs) == 9 and all(ratio["memory"] is None for ratio in case["ratios"])
    for loo in ("exact", "masked", "off"):
        shares = contender(found, loo)["shares"]
        assert tuple(shares) == PARTS
        assert sum(shares.values()) == pytest.approx(1)
        assert contender(found, loo)["flop_utilisation"] > 0


def test_growth_over_passages_says_what_one_more_costs_in_tokens(found, scorer):
    grown = found["growth"][0]
    assert (grown["axis"], [row["size"] for row in grown["modes"][0]["sizes"]]) == ("passages", [2, 4])
    (case,) = (generated(Shape(150, 40, 2), 1, scorer),)
    reading = scorer.trace(case.records[0])[0]
    own = len(reading.windows[0].full) - reading.windows[0].layout.passages[1] + 40 - 1
    lines = {mode["name"]: mode["line"] for mode in grown["modes"]}
    assert lines["off"]["tokens_per_passage"] == pytest.approx(0, abs=3)  # questions differ in length
    assert lines["masked"]["tokens_per_passage"] == pytest.approx(own, abs=12)
    assert lines["exact"]["tokens_per_passage"] > lines["masked"]["tokens_per_passage"]


def test_growth_over_answers_reads_that_many(found):
    sizes = found["growth"][1]["modes"][0]["sizes"]
    assert [row["size"] for row in sizes] == [1, 2]
    assert sizes[1]["computed_tokens"] > sizes[0]["computed_tokens"]
    assert found["growth"][1]["modes"][0]["line"] is None


def test_contenders_take_turns():
    order = []
    time_rounds({name: lambda name=name: order.append(name) for name in "ab"}, 3, CPU, lambda _: None)
    assert "".join(order) == "ababab"


def test_watching_one_run_leaves_nothing_behind_even_when_it_fails(scorer, case):
    before = passes.reduce_vocabulary, passes.kernel_for, Head.logits
    hooks = len(scorer.model.base_model._forward_hooks)

    def fail():
        scorer.trace(case.records[0])
        raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError):
        shares_of_time(scorer, fail)
    assert (passes.reduce_vocabulary, passes.kernel_for, Head.logits) == before
    assert len(scorer.model.base_model._forward_hooks) == hooks
    assert scorer.trace(case.records[0])[1][0].n_computed_tokens


def test_a_kernel_counts_as_reductions_its_product_included(scorer, case, monkeypatch):

    def slow_kernel(*given, reduce=passes.reduce_vocabulary, **how):
        time.sleep(0.3)  # beside which all else of a tiny scorer is nothing
        return reduce(*given, **how)

    monkeypatch.setattr(passes, "kernel_for", lambda *_: slow_kernel)
    shares = shares_of_time(scorer, lambda: scorer.trace(case.records[0]))
    assert shares["reductions"] > 0.5
    assert passes.kernel_for(None, 0.0) is slow_kernel


def test_the_authors_package_gives_our_numbers_on_its_own_prompts(tiny_scorer_dir):
    pytest.importorskip("gasp", reason="compares with the package gasp-rag")
    spec = ScorerSpec(str(tiny_scorer_dir), profile="gasp-v2")
    scorer = spec.load()
    (record,) = generated(SHAPE, 1, scorer).records
    ours, theirs = reader("exact", spec, scorer)(record), reader("gasp-rag", spec)(record)
    assert ours.numbers["features"].shape == theirs.numbers["features"].shape
    assert largest_difference(theirs, ours)["features"] < 1e-3
    assert torch.is_grad_enabled(), "the package turns gradients off for the whole process"


def test_the_authors_package_reads_the_same_conditions_uncut(spec, case):
    pytest.importorskip("gasp", reason="runs the package gasp-rag")
    outcome = reader("gasp-rag", spec)(case.records[0])
    separate = reader("separate", spec)(case.records[0])
    assert outcome.n_tokens == pytest.approx(separate.n_tokens, rel=0.05)
    assert outcome.numbers == {}, "its prompts differ from ours by a space, so its numbers are not compared"


@pytest.mark.skipif(sys.platform != "linux", reason="the high-water mark is set back on Linux only")
def test_peak_memory_is_measured_in_a_process_of_its_own(spec, case):
    assert extra_peak_bytes("exact", spec, print, case.records[0], CPU) > 0


def test_a_memory_process_that_fails_is_one_line(spec, case, monkeypatch):
    monkeypatch.setattr("jobs.bench_meters.sys.executable", shutil.which("false"))
    with pytest.raises(JobError, match="memory of exact failed: exit code 1: out of memory"):
        extra_peak_bytes("exact", spec, print, case.records[0], CPU)


def test_the_command_reads_logs_prints_tables_and_writes_json(leadline, monkeypatch, tmp_path, spec):
    monkeypatch.setattr("jobs.bench_cases.extra_peak_bytes", lambda *_: 5 << 20)
    log = write_rows(tmp_path / "log.jsonl", [row(number) for number in range(3)])
    file = tmp_path / "bench.json"
    options = ["--scorer", spec.name, "--repeats", 1, "--answers", 2, "--against", "separate,padded"]
    done = leadline(log, *options, "--loo", "exact,off", "--json", file)
    assert (done.code, done.out.count("against")) == (0, 4), done.err
    assert "2 answers (logs)" in done.out and "5 MiB" in done.out and "GFLOP/s" in done.out
    (case,) = json.loads(file.read_text())["cases"]
    assert (case["source"], case["n_answers"], case["mean_pieces"]) == ("logs", 2, 2)


def test_the_suite_joins_the_passages_of_logs_and_generates_its_other_cases(
    leadline, monkeypatch, tmp_path, spec
):
    monkeypatch.setattr("jobs.bench_cases.extra_peak_bytes", lambda *_: None)
    monkeypatch.setattr("jobs.bench_cases.SUITE", (SHAPE, Shape(200, 40, 4)))
    log = write_rows(tmp_path / "log.jsonl", [row(number) for number in range(3)])
    file = tmp_path / "bench.json"
    options = ["--suite", "--scorer", spec.name, "--repeats", 1, "--against", "reference", "--json", file]
    done = leadline(log, *options)
    assert done.code == 0, done.err
    first, second = json.loads(file.read_text())["cases"]
    assert (first["source"], first["n_answers"]) == ("logs", 3)
    assert (second["source"], second["n_answers"], second["mean_pieces"]) == ("generated", 1, 4)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--loo", "half"], "--loo half: unknown; one or more of exact,masked,off"),
        (["--against", "vllm"], f"--against vllm: unknown; one or more of {','.join(PEERS)}"),
        (["--grow", "passages=2"], "--grow passages=2: write passages=2,5,10 or answers=10,100"),
        (["--grow", "weight=2,3"], "--grow weight=2,3: write passages="),
        (["--grow", "answers=2,x"], "--grow answers=2,x: write passages="),
        (["--repeats", "0"], "--repeats and --answers: at least 1 each"),
        (["--context-tokens", "20"], "more --context-tokens"),
        (["--set", "scorer.window_tokens=64"], "C = 700, A = 200, K = 5: "),
    ],
)
def test_what_cannot_be_measured_is_refused_in_one_line(leadline, spec, words, line):
    done = leadline("--scorer", spec.name, "--repeats", 1, *words)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("leadline: error: ") and done.err.count("\n") == 1
    assert line in done.err


def test_without_the_package_the_line_says_how_to_install_it(leadline, monkeypatch):
    monkeypatch.setattr("jobs.bench_peers.importlib.util.find_spec", lambda _: None)
    done = leadline("--against", "gasp-rag")
    assert done.code == 2
    assert "pip install gasp-rag==0.2.1" in done.err and "--against reference" in done.err


def test_the_gpu_suite_runs_dry_with_torch_transformers_and_numpy_alone(tmp_path):
    absent = sorted({"gasp", "sentencex"} | NOT_FOR_THE_DETECTOR - {"jobs"} - BROUGHT_BY_TRANSFORMERS)
    file = tmp_path / "gpu.json"
    done = run_python(
        "import sys, transformers\n"
        f"sys.modules.update(dict.fromkeys({absent!r}))\n"
        "import jobs.bench, jobs.bench_gpu\n"
        f"sys.argv = ['bench', '--gpu-suite', '--tiny', '--repeats', '1', '--json', {str(file)!r}]\n"
        "sys.exit(jobs.bench.main())\n"
    )
    assert done.returncode == 0, done.stderr
    runs = json.loads(file.read_text())
    assert [run["scorer"]["name"] for run in runs] == ["tiny, random weights"] * 2
    assert [case["mean_pieces"] for run in runs for case in run["cases"]] == [2, 3]
    names = [one["name"] for one in runs[0]["cases"][0]["contenders"]]
    assert names == ["exact", "masked", "off", "reference", "padded", "separate"]
    for rows in (run["executors"] for run in runs):
        assert [row["mode"] for row in rows[::3]] == ["exact", "masked", "off"] and len(rows) == 9
        walk, alone, many = (row["computed_tokens"] for row in rows[:3])
        assert walk == alone > many  # which reads once what all prompts begin with
        assert 0 < max(row["off_walk_nats"] for row in rows) < 1e-4
    assert "Packs against the cached walk" in done.stdout


def test_tables_are_plain_text_where_rich_is_missing(found, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "rich.table", None)
    show(found)
    printed = capsys.readouterr().out
    assert "exact against padded" in printed and "masked: a passage more takes" in printed
    assert "\u2500" not in printed


def test_differences_are_taken_where_shapes_agree(spec, scorer, case):
    exact, off = (reader(name, spec, scorer)(case.records[0]) for name in ("exact", "off"))
    assert set(largest_difference(exact, off)) == {"features"}
    assert largest_difference(exact, exact) == {"logprob": 0, "jsd": 0, "features": 0}
    assert np.isfinite(exact.numbers["features"]).all()


def test_the_scorer_of_a_spec_has_no_bundle(spec):
    assert isinstance(spec.load(), Scorer) and spec.load().bundle is None
