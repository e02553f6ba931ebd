"""The driver: what a whole run comes to, what a second call does, what is refused, what fails and how."""

import json
import shutil
import sys

import polars as pl
import pyarrow.parquet as pq
import pytest

import jobs.audit
import jobs.bundles
import jobs.lease
import jobs.listing
from detector.errors import ProfileError, ScorerError
from detector.identity import fingerprint
from jobs.audit import audit, rejudge
from jobs.cli import main
from jobs.errors import ConfigError, JobError
from jobs.lease import hold
from jobs.logs import line_handler, logging_to
from jobs.storage import Storage
from tests import fake_scorer, stand_in_head
from tests.runs import N_REJECTED, N_ROWS, markers, row, settings, tables, write_logs, write_rows

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_local")]


@pytest.fixture(scope="module")
def scene(tmp_path_factory, ray_local):
    """Logs, the folder by which a test talks to the fake scorer in the workers, and a finished run."""
    folder = tmp_path_factory.mktemp("audit")
    write_logs(folder / "logs")
    (folder / "scorer").mkdir()
    run(folder / "logs", folder / "finished", settings(folder / "scorer"))
    return folder


@pytest.fixture
def scorer(scene):
    return scene / "scorer"


@pytest.fixture
def logs(scene):
    return scene / "logs"


@pytest.fixture
def own_logs(tmp_path):
    """Logs that a test may change."""
    return write_logs(tmp_path / "logs")


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


@pytest.fixture
def finished(scene, out):
    """The OUT of a finished run, to be changed at will."""
    return shutil.copytree(scene / "finished", out)


def run(logs, out, config, **more):
    fakes = {"identify": fake_scorer.identify, "load": fake_scorer.load}
    return audit([str(logs)], str(out), config, **fakes | more)


def interrupt(logs, out, config):
    """Ctrl-C when about half of the units are measured. A worker may commit one more before it is gone."""

    def watch(progress):
        if progress.n_units_done >= progress.n_units // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(logs, out, config, on_progress=watch)
    assert 0 < len(markers(out)) < json.loads((out / "run.json").read_text())["n_units"]


def forbid(monkeypatch, module, name):
    def forbidden(*_, **__):
        raise AssertionError(f"{name} must not be called")

    monkeypatch.setattr(module, name, forbidden)


def test_a_run_reads_everything_and_ends_with_success(logs, scorer, out):
    result = run(logs, out, settings(scorer))
    totals = result.totals
    assert (totals["n_read"], totals["n_rejected"]) == (N_ROWS, N_REJECTED)
    assert totals["n_audited"] == N_ROWS - N_REJECTED
    assert (totals["n_duplicate"], totals["n_missing_answer"], totals["n_no_passages"]) == (1, 1, 1)
    assert 0 < result.flagged_share < 1
    assert result.n_units == result.n_units_measured == len(markers(out)) > 6
    for name in ("run.json", "_SUCCESS", "profile.json", "report/index.html"):
        assert (out / name).is_file()
    assert not (out / "progress.json").exists()
    assert result.report_url == str(out / "report/index.html")


def test_a_relative_out_means_the_same_folder_to_every_worker(scene, logs, scorer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run(logs, "out", settings(scorer))
    assert tables(tmp_path / "out") == tables(scene / "finished")


def test_tables_do_not_depend_on_the_number_of_workers(scene, logs, scorer, out):
    run(logs, out, settings(scorer, workers={"count": 1, "device": "cpu"}))
    assert tables(out) == tables(scene / "finished")


def test_the_same_call_again_does_nothing(logs, scorer, finished, monkeypatch):
    before = {path: path.stat().st_mtime_ns for path in finished.rglob("*")}
    forbid(monkeypatch, jobs.listing, "freeze")  # a finished run needs its logs no more
    forbid(monkeypatch, jobs.audit, "_ray")
    again = run(logs, finished, settings(scorer))
    assert again.totals == json.loads((finished / "_SUCCESS").read_text())["totals"]
    assert again.n_units_measured == 0
    assert {path: path.stat().st_mtime_ns for path in finished.rglob("*")} == before


def test_a_driver_beside_another_is_refused_and_changes_nothing(logs, scorer, finished, out):
    before = tables(finished)
    with hold(Storage(), str(finished)):
        for drive in (
            lambda: run(logs, finished, settings(scorer, judge={"flag_budget": 0.5})),
            lambda: rejudge(str(finished), settings(scorer, judge={"flag_budget": 0.5})),
        ):
            with pytest.raises(JobError, match="another driver is at work here"):
                drive()
        assert run(logs, finished, settings(scorer)).n_units_measured == 0  # nothing to do needs no lease
    assert tables(finished) == before and (finished / "_SUCCESS").exists()


def test_a_driver_that_was_succeeded_judges_nothing(logs, scorer, finished, monkeypatch):
    before = tables(finished)
    conclude = jobs.audit._conclude

    def lose_the_lease_first(*arguments):
        (lease,) = finished.glob("lease/*.json")
        lease.unlink()
        monkeypatch.setattr(jobs.lease, "_TRUST_SECONDS", 0.0)
        return conclude(*arguments)

    monkeypatch.setattr(jobs.audit, "_conclude", lose_the_lease_first)
    with pytest.raises(JobError, match="no longer holds it"):
        rejudge(str(finished), settings(scorer, judge={"flag_budget": 0.5}))
    assert tables(finished) == before and (finished / "_SUCCESS").exists()


def test_another_flag_budget_only_judges_again(logs, scorer, finished, monkeypatch):
    before = tables(finished)
    first = json.loads((finished / "_SUCCESS").read_text())["totals"]
    forbid(monkeypatch, jobs.audit, "_ray")
    again = run(logs, finished, settings(scorer, judge={"flag_budget": 0.5}))
    assert again.totals["n_flagged_sentences"] > first["n_flagged_sentences"]
    assert again.n_units_measured == 0
    measured = {path: digest for path, digest in before.items() if path.startswith("measurements/")}
    assert measured.items() <= tables(finished).items()
    assert rejudge(str(finished), settings(scorer)).totals == first
    assert tables(finished) == before


def test_a_page_written_again_tells_what_the_verdicts_were_reached_with(scorer, finished, monkeypatch):
    rejudge(str(finished), settings(scorer, judge={"evidence_floor_nats": 0.6}))
    page = (finished / "report" / "index.html").read_text()
    assert "0.60 nats" in page or "0.6 nats" in page
    words = ["report", str(finished), "--set", "judge.evidence_floor_nats=0.01"]
    monkeypatch.setattr(sys, "argv", ["leadline", *words])
    assert main() == 0
    assert (finished / "report" / "index.html").read_text() == page
    rejudge(str(finished), settings(scorer))


def test_the_lines_of_a_driver_name_its_run(logs, scorer, finished, capsys):
    with logging_to(line_handler("json")):
        result = run(logs, finished, settings(scorer, judge={"flag_budget": 0.5}))
    (line,) = [json.loads(line) for line in capsys.readouterr().err.splitlines() if "judging" in line]
    assert line["run_id"] == result.run_id


def test_a_run_from_before_attention_was_measured_is_judged_by_what_it_has(
    logs, scorer, finished, monkeypatch
):
    path = finished / "run.json"
    old = json.loads(path.read_text())
    del old["scorer"]["reads_attention"]
    old["measured_by"]["loo"] = old["config"]["loo"] = "exact"  # passages were removed, then
    path.write_text(json.dumps(old))
    forbid(monkeypatch, jobs.audit, "_ray")
    assert run(logs, finished, settings(scorer, loo="exact")).threshold.method == "gasp"
    assert rejudge(str(finished), settings(scorer)).threshold.method == "gasp"


def test_a_scorer_whose_attention_cannot_be_read_is_judged_by_gasp(logs, scorer, finished, out, monkeypatch):
    first = json.loads((finished / "_SUCCESS").read_text())
    assert first["threshold"]["method"] == "blend"
    identify = lambda config: fake_scorer.identify(config) | {"reads_attention": False}  # noqa: E731
    with pytest.raises(ConfigError, match="blend reads attention"):
        run(logs, out / "new", settings(scorer, methods=("blend",)), identify=identify)
    assert not (out / "new").exists()
    result = run(logs, out / "new", settings(scorer), identify=identify)
    assert result.threshold.method == "gasp"


def test_a_run_that_died_while_it_was_judged_again_needs_no_logs(own_logs, scorer, out, monkeypatch):
    first = run(own_logs, out, settings(scorer))
    (out / "_SUCCESS").unlink()
    shutil.rmtree(own_logs)
    assert run(own_logs, out, settings(scorer)).totals == first.totals


def test_a_profile_of_another_run_is_applied_and_remembered(scene, logs, scorer, finished, monkeypatch):
    profile = scene / "finished/profile.json"
    config = settings(scorer, judge={"flag_budget": 0.9})
    run(logs, finished, config)  # another threshold
    first = run(logs, finished, config, profile=str(profile))
    found = pq.read_table(finished / "findings/sentences", partitioning=None)
    assert set(found["threshold"].to_pylist()) == {json.loads(profile.read_text())["threshold"]}
    forbid(monkeypatch, jobs.audit, "_conclude")
    assert run(logs, finished, config, profile=str(profile)) == first


@pytest.mark.parametrize("content", ["another scorer", "{", None])
def test_a_profile_that_does_not_fit_is_refused_before_anything_is_measured(
    scene, logs, scorer, out, tmp_path, monkeypatch, content
):
    path = tmp_path / "profile.json"
    if content == "another scorer":
        tree = json.loads((scene / "finished/profile.json").read_text())
        content = json.dumps(tree | {"scorer_fingerprint": "other"})
    if content is not None:
        path.write_text(content)
    forbid(monkeypatch, jobs.audit, "_ray")
    with pytest.raises(ProfileError):
        run(logs, out, settings(scorer), profile=str(path))


def test_another_runs_out_is_refused_before_any_log_is_read(logs, scorer, finished, monkeypatch):
    forbid(monkeypatch, jobs.listing, "freeze")
    with pytest.raises(ConfigError, match="loo"):
        run(logs, finished, settings(scorer, loo="off", methods=["gap"], judge={"deciding_method": "gap"}))


def test_a_scorer_that_is_no_model_is_refused_before_any_log_is_read(logs, out, tmp_path, monkeypatch):
    forbid(monkeypatch, jobs.listing, "freeze")
    (tmp_path / "not-a-model").mkdir()
    with pytest.raises(ScorerError, match="not-a-model"):
        audit([str(logs)], str(out), settings(tmp_path / "not-a-model"))
    assert not out.exists()


def test_a_missing_prefix_is_refused_and_nothing_is_written(scorer, out, tmp_path):
    with pytest.raises(JobError, match="nowhere"):
        run(tmp_path / "nowhere", out, settings(scorer))
    assert not out.exists()


def test_an_interrupted_run_is_finished_by_the_same_call(own_logs, scorer, out):
    interrupt(own_logs, out, settings(scorer))
    n_done = len(markers(out))
    assert json.loads((out / "progress.json").read_text())["n_units"] > n_done
    write_rows(own_logs / "z.jsonl", [row(500)])  # has arrived since: the next run's
    result = run(own_logs, out, settings(scorer))
    assert 0 < result.n_units_measured <= result.n_units - n_done
    assert result.totals["n_read"] == N_ROWS


def test_an_unfinished_run_is_not_mixed_with_changed_logs_or_another_dtype(own_logs, scorer, out):
    interrupt(own_logs, out, settings(scorer))
    with pytest.raises(JobError, match="bfloat16 and in float32"):
        run(own_logs, out, settings(scorer), load=fake_scorer.load_halves)
    write_rows(own_logs / "b.jsonl", [row(500)])
    with pytest.raises(JobError, match=r"b\.jsonl: changed"):
        run(own_logs, out, settings(scorer))
    assert {json.loads(path.read_text())["dtype"] for path in markers(out)} == {"float32"}


def test_what_a_scorer_cannot_tell_from_rounding_is_no_evidence(logs, scorer, out, tmp_path):
    run(logs, out, settings(scorer))
    noisy = tmp_path / "noisy"
    run(logs, noisy, settings(scorer), load=fake_scorer.load_noisy)
    floors, evidence = [], []
    for each in (out, noisy):
        floors.append(json.loads((each / "_SUCCESS").read_text())["noise_floor_nats"])
        drops = pl.read_parquet(each / "findings/sentences/*/*.parquet")["evidence_drop_nats"].drop_nulls()
        evidence.append((drops.min(), len(drops)))
    assert floors == [1e-6, 1.0]
    assert evidence[0][0] < 1.0 and evidence[0][1] > evidence[1][1]
    assert evidence[1][0] is None or evidence[1][0] >= 1.0
    assert run(logs, noisy, settings(scorer)).n_units_measured == 0  # the settings are still the same


def test_a_storage_error_costs_an_attempt_and_nothing_else(logs, scorer, out, tmp_path):
    fake_scorer.order_fault(scorer, "error", "part", out, n_markers=1)
    result = run(logs, out, settings(scorer))
    assert fake_scorer.withdraw_fault(scorer)
    assert sorted(json.loads(path.read_text())["attempt"] for path in markers(out))[-2:] == [1, 2]
    assert result.totals["n_read"] == N_ROWS


def test_a_record_that_kills_every_worker_is_rejected_alone(scorer, out, tmp_path):
    rows = [row(0, answer="die here"), row(1), row(2)]
    logs = write_rows(tmp_path / "logs.jsonl", rows)
    config = settings(scorer, workers={"count": 1, "device": "cpu"}, read={"unit_bytes": 1 << 20})
    totals = run(logs, out, config).totals
    assert (totals["n_read"], totals["n_audited"], totals["n_scoring_failed"]) == (3, 2, 1)


def test_a_unit_that_kills_its_worker_and_is_not_tried_again_fails_alone(scorer, out, tmp_path):
    rows = [row(number) for number in range(12)]
    rows[4] = row(4, answer="die here")
    logs = write_rows(tmp_path / "logs.jsonl", rows)
    with pytest.raises(JobError, match=r"1 of \d+ units failed every one of 1 attempts.*worker died"):
        run(logs, out, settings(scorer, workers={"count": 2, "device": "cpu", "max_attempts": 1}))
    n_units = json.loads((out / "run.json").read_text())["n_units"]
    assert len(markers(out)) == n_units - 1
    assert len(json.loads((out / "progress.json").read_text())["failed"]) == 1
    assert not (out / "_SUCCESS").exists() and not (out / "findings").exists()
    with pytest.raises(JobError, match="units are measured"):
        rejudge(str(out), settings(scorer))


def test_a_log_that_changes_while_it_is_read_fails_its_units_alone(own_logs, scorer, out):
    def append(progress):
        if progress.n_workers == 0 and progress.n_units_done == 0:
            write_rows(own_logs / "b.jsonl", [row(500)])

    config = settings(scorer, workers={"count": 2, "device": "cpu", "max_attempts": 1})
    with pytest.raises(JobError, match=r"JobError: \S+b\.jsonl: changed since the run began"):
        run(own_logs, out, config, on_progress=append)
    assert 0 < len(markers(out)) < json.loads((out / "run.json").read_text())["n_units"]


def test_a_scorer_that_no_worker_can_load_ends_the_run_with_its_reason(logs, scorer, out):
    with pytest.raises(JobError, match="too large for this machine"):
        config = settings(scorer, workers={"count": 1, "device": "cpu", "max_attempts": 2})
        run(logs, out, config, load=fake_scorer.load_or_die)


def test_progress_grows_to_the_whole_run(logs, scorer, out):
    seen = []
    result = run(logs, out, settings(scorer), on_progress=seen.append)
    done = [progress.n_units_done for progress in seen]
    assert done == sorted(done) and done[0] == 0 and done[-1] == result.n_units
    assert seen[-1].n_read == N_ROWS and seen[-1].n_units_running == 0
    assert seen[-1].rejects == {"malformed_row": 1, "missing_answer": 1, "no_passages": 1}


def test_a_real_scorer_measures_every_answer(logs, tiny_scorer_dir, out):
    config = settings(tiny_scorer_dir, workers={"count": 1, "device": "cpu"})
    result = audit([str(logs)], str(out), config)
    assert (result.totals["n_read"], result.totals["n_rejected"]) == (N_ROWS, N_REJECTED)
    assert json.loads((out / "_SUCCESS").read_text())["dtypes"] == ["float32"]


# --- with a bundle


@pytest.fixture(autouse=True)
def ensemble(monkeypatch):
    monkeypatch.setitem(sys.modules, "detector.ensemble", stand_in_head)


@pytest.fixture(scope="module")
def bundle(scene):
    made = stand_in_head.bundle(fake_scorer.FINGERPRINT)
    made.save(scene / "bundle")
    return made


@pytest.fixture
def judged(scene, bundle, logs, scorer, out):
    """A finished run that was judged by the bundle."""
    if not (scene / "judged").exists():
        run(logs, scene / "judged", settings(scorer, bundle=str(scene / "bundle")))
    return shutil.copytree(scene / "judged", out)


def test_a_bundle_judges_where_one_is_given_and_the_run_remembers_it(scene, judged, bundle, logs, scorer):
    result = run(logs, judged, settings(scorer, bundle=str(scene / "bundle")))
    assert result.n_units_measured == 0
    assert result.threshold == jobs.audit.Threshold(
        "ensemble", 0.6, f"bundle {bundle.digest}", None, 0.05, "Made-Up QA, English"
    )
    remembered = json.loads((judged / "run.json").read_text())
    assert remembered["measured_by"]["bundle"] == bundle.digest
    assert remembered["config"]["bundle"] == f"{scene / 'bundle'}#{bundle.digest}"
    assert remembered["config"]["judge"]["deciding_method"] == "ensemble"
    assert remembered["config"]["methods"][0] == "ensemble"
    assert remembered["scorer"]["bundle"]["data"] == "Made-Up QA, English"
    found = pq.read_table(judged / "findings/sentences", partitioning=None)
    assert found["score"].to_pylist() == found["score_ensemble"].to_pylist()
    assert set(found["threshold"].to_pylist()) == {0.6}
    assert found["flagged"].to_pylist() == [score >= 0.6 for score in found["score"].to_pylist()]
    assert "operating point" in (judged / "report/index.html").read_text()


def test_a_run_is_judged_again_without_its_bundle(scene, judged, bundle, scorer, tmp_path, monkeypatch):
    forbid(monkeypatch, jobs.bundles, "read_bundle")
    from jobs.options import JudgeOptions, settings_of_run

    config = settings_of_run(str(judged), JudgeOptions(set=["judge.target_fpr=0.02"]))
    result = rejudge(str(judged), config)
    assert (result.threshold.value, result.threshold.target_fpr) == (0.8, 0.02)
    found = pq.read_table(judged / "findings/sentences", partitioning=None)
    assert set(found["threshold"].to_pylist()) == {0.8}
    with pytest.raises(ProfileError, match=r"0\.03 was not measured"):
        rejudge(str(judged), settings_of_run(str(judged), JudgeOptions(set=["judge.target_fpr=0.03"])))


def test_two_passes_are_enough_for_a_bundle(scene, bundle, logs, scorer, out):
    result = run(logs, out, settings(scorer, bundle=str(scene / "bundle"), loo="off"))
    assert result.threshold.method == "ensemble"
    assert "gasp" not in json.loads((out / "run.json").read_text())["config"]["methods"]


def test_another_bundle_does_not_go_on_with_a_run(scene, judged, logs, scorer, tmp_path):
    stand_in_head.bundle(fake_scorer.FINGERPRINT, seed=5).save(tmp_path / "other")
    for place in (str(tmp_path / "other"), "none"):
        with pytest.raises(ConfigError, match=r"holds another run.*bundle"):
            run(logs, judged, settings(scorer, bundle=place))


def test_a_bundle_that_does_not_fit_is_refused_before_the_first_byte_is_read(
    scene, bundle, logs, scorer, out, tmp_path, monkeypatch
):
    forbid(monkeypatch, jobs.listing, "freeze")
    stand_in_head.bundle("another-one").save(tmp_path / "of-another")
    cases = [
        (str(tmp_path / "of-another"), {}, "fitted for the scorer tiny"),
        (str(scene / "bundle"), {"profile": "chat"}, "prompt profile plain, here it is chat"),
        (str(tmp_path / "nowhere"), {}, "cannot be read"),
        (str(scene / "bundle"), {"judge": {"target_fpr": 0.03}}, "was not measured"),
        (f"{scene / 'bundle'}#{'0' * 12}", {}, "000000000000 is asked for"),
        ("s3://key:secret@bucket/b", {}, "credentials"),
    ]
    for place, more, message in cases:
        with pytest.raises((ProfileError, ConfigError), match=message) as caught:
            run(logs, out, settings(scorer, bundle=place, **more))
        assert "\n" not in str(caught.value) and "secret" not in str(caught.value)
        assert not out.exists()


def test_a_real_scorer_judges_by_a_bundle_in_the_workers(logs, tiny_scorer_dir, out, tmp_path, monkeypatch):
    info = fingerprint(str(tiny_scorer_dir))
    stand_in_head.bundle(info.fingerprint).save(tmp_path / "b")
    config = settings(tiny_scorer_dir, workers={"count": 1, "device": "cpu"}, bundle=str(tmp_path / "b"))
    result = audit([str(logs)], str(out), config, load=stand_in_head.load)
    assert result.threshold.method == "ensemble"
    measured = pq.read_table(out / "measurements/sentences", partitioning=None)
    assert measured["ensemble"].null_count == 0 and len(set(measured["ensemble"].to_pylist())) > 10
