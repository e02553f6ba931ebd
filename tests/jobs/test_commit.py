"""The durability protocol: what OUT may hold, who may continue it, what is left behind."""

import json
from datetime import UTC, datetime

import pytest

from jobs.commit import (
    Run,
    check_conservation,
    check_measured,
    check_resumable,
    create_run,
    find_run,
    finish,
    read_markers,
    read_run,
    read_success,
    resume_run,
    sweep,
    write_marker,
    write_progress,
)
from jobs.config import Config, ScorerConfig
from jobs.errors import ConfigError, JobError
from jobs.storage import Storage

SCORER = {"name": "fake", "fingerprint": "abc", "window_tokens": 2048, "dtype": "float32"}
STORAGE = Storage()


@pytest.fixture
def logs(tmp_path):
    folder = tmp_path / "logs"
    folder.mkdir()
    (folder / "a.jsonl").write_text("{}\n")
    (folder / "b.jsonl").write_text("{}\n{}\n")
    return folder


@pytest.fixture
def out(tmp_path):
    return str(tmp_path / "out")


def listed(folder):
    return [{"url": found.url, "size": found.size, "etag": found.etag} for found in STORAGE.list(str(folder))]


def create(out, logs, config=None, scorer=SCORER, n_units=2, **more) -> Run:
    return create_run(STORAGE, out, [str(logs)], config or Config(), scorer, listed(logs), n_units, **more)


def marker(unit_id, parts=(), n_read=2, n_audited=1, n_rejected=1):
    return {
        "unit_id": unit_id,
        "parts": [{"url_suffix": part} for part in parts],
        "n_read": n_read,
        "n_audited": n_audited,
        "n_rejected": n_rejected,
    }


def test_an_empty_out_holds_no_run(out, logs):
    assert resume_run(STORAGE, out, [str(logs)], Config(), SCORER) is None


def test_the_same_command_takes_up_the_run_that_is_there(out, logs):
    created = create(out, logs)
    assert resume_run(STORAGE, out, [str(logs)], Config(), SCORER) == created
    assert read_run(STORAGE, out) == created


def test_a_trailing_slash_and_a_relative_path_name_the_same_logs(out, logs, monkeypatch):
    created = create(out, logs)
    monkeypatch.chdir(logs.parent)
    assert resume_run(STORAGE, out, ["logs/"], Config(), SCORER) == created


def test_the_order_of_logs_and_a_slash_at_their_end_do_not_matter(out, logs):
    named = ["s3://bucket/b", "s3://bucket/a/"]
    created = create_run(STORAGE, out, named, Config(), SCORER, listed(logs), 2)
    assert resume_run(STORAGE, out, ["s3://bucket/a", "s3://bucket/b/"], Config(), SCORER) == created


def test_run_id_depends_on_files_settings_and_scorer_and_not_on_time_or_place(tmp_path, logs):
    def run_id(name, **changes):
        return create(str(tmp_path / name), logs, **changes).run_id

    first = run_id("a")
    assert run_id("b", now=datetime(2031, 1, 1, tzinfo=UTC)) == first
    assert run_id("c", config=Config(fail_over=0.5)) == first
    assert run_id("d", config=Config(loo="off")) != first
    assert run_id("e", scorer=SCORER | {"fingerprint": "other"}) != first
    (logs / "c.jsonl").write_text("{}\n")
    assert run_id("f") != first


def test_date_is_the_utc_day_of_the_first_start(out, logs):
    assert create(out, logs, now=datetime(2026, 3, 1, 0, 30, tzinfo=UTC)).date == "2026-03-01"


def test_another_run_in_out_is_refused_with_every_difference_and_what_to_do(out, logs, tmp_path):
    create(out, logs)
    config = Config(loo="off", scorer=ScorerConfig(dtype="float16"))
    with pytest.raises(ConfigError) as caught:
        resume_run(STORAGE, out, [str(tmp_path / "other")], config, SCORER | {"fingerprint": "xyz"})
    message = str(caught.value)
    assert 'loo: "auto" there, "off" now' in message
    assert 'scorer.dtype: "auto" there, "float16" now' in message
    assert 'scorer.fingerprint: "abc" there, "xyz" now' in message
    assert "logs: " in message and str(tmp_path / "other") in message
    assert "--out" in message and "\n" not in message


def test_settings_that_no_measurement_depends_on_may_change(out, logs):
    created = create(out, logs)
    config = Config.model_validate({"judge": {"flag_budget": 0.3}, "workers": {"count": 7}})
    assert resume_run(STORAGE, out, [str(logs)], config, SCORER) == created


def test_a_folder_with_other_files_is_refused(out, logs):
    STORAGE.write(f"{out}/thesis.tex", b"precious")
    with pytest.raises(ConfigError, match=r"not empty and no run\.json"):
        resume_run(STORAGE, out, [str(logs)], Config(), SCORER)


@pytest.mark.parametrize("content", [b"{", b"[]", b'{"run_id": "x"}', b'{"surprise": 1}'])
def test_a_run_json_of_somebody_else_is_refused(out, content):
    STORAGE.write(f"{out}/run.json", content)
    with pytest.raises(ConfigError, match=r"run\.json"):
        find_run(STORAGE, out)


def test_reading_a_run_that_is_not_there_says_so(out):
    with pytest.raises(ConfigError, match="not the OUT of a run"):
        read_run(STORAGE, out)


@pytest.mark.parametrize(
    "url",
    [
        "s3://AKIAX:topsecret@bucket/logs",
        "https://host/log.jsonl?X-Amz-Signature=topsecret",
        "S3://k:topsecret@b",
        "simplecache::s3://k:topsecret@b/logs",
        "zip://*.jsonl::https://host/logs.zip?sig=topsecret",
    ],
)
def test_urls_with_credentials_are_refused_and_not_repeated(out, url):
    for logs, where in (([url], out), (["logs"], url)):
        with pytest.raises(ConfigError, match="credentials") as caught:
            resume_run(STORAGE, where, logs, Config(), SCORER)
        assert "topsecret" not in str(caught.value)


def test_run_json_holds_no_storage_option_that_may_be_secret(out, logs):
    options = {
        "key": "AKIAX",
        "secret": "topsecret",
        "client_kwargs": {"aws_session_token": "topsecret"},
        "endpoint_url": "http://user:topsecret@host:1",
    }
    create(out, logs, Config(storage=options))
    text = STORAGE.read(f"{out}/run.json").decode()
    assert "topsecret" not in text and "AKIAX" not in text
    assert json.loads(text)["config"]["storage"]["endpoint_url"] == "http://***@host:1"


def test_new_files_are_left_to_the_next_run(out, logs):
    run = create(out, logs)
    (logs / "c.jsonl").write_text("{}\n")
    check_resumable(out, run, STORAGE.list(str(logs)))


@pytest.mark.parametrize(("change", "word"), [("grow", "changed"), ("delete", "vanished")])
def test_an_input_file_that_changed_or_vanished_stops_an_unfinished_run(out, logs, change, word):
    run = create(out, logs)
    if change == "grow":
        (logs / "b.jsonl").write_text("{}\n{}\n{}\n")
    else:
        (logs / "b.jsonl").unlink()
    with pytest.raises(JobError, match=rf"b\.jsonl: {word}"):
        check_resumable(out, run, STORAGE.list(str(logs)))


def test_an_unfinished_run_of_another_version_is_refused(out, logs):
    create(out, logs)
    tree = json.loads(STORAGE.read(f"{out}/run.json")) | {"leadline_version": "0.0.1"}
    STORAGE.write(f"{out}/run.json", json.dumps(tree).encode())
    with pytest.raises(ConfigError, match=r"begun by leadline 0\.0\.1"):
        check_resumable(out, read_run(STORAGE, out), STORAGE.list(str(logs)))


def test_markers_are_read_back_by_unit_and_partial_files_are_no_markers(out):
    assert read_markers(STORAGE, out) == {}
    for unit in ("b", "a"):
        write_marker(STORAGE, out, marker(unit))
    STORAGE.write(f"{out}/units/.c.json.123.partial", b'{"unit')
    assert list(read_markers(STORAGE, out)) == ["a", "b"]
    assert read_markers(STORAGE, out)["a"] == marker("a")


def test_of_two_attempts_at_a_unit_the_first_marker_stands_and_its_parts_stay(out):
    parts = [f"measurements/responses/date=2026-01-01/a-{name}.parquet" for name in ("1" * 12, "2" * 12)]
    for part in parts:
        STORAGE.write(f"{out}/{part}", b"x")
    first, second = marker("a", parts[:1]), marker("a", parts[1:])
    assert write_marker(STORAGE, out, first) == first
    assert write_marker(STORAGE, out, second) == first
    assert write_marker(STORAGE, out, first) == first  # its answer may have been lost
    markers = read_markers(STORAGE, out)
    assert markers == {"a": first}
    assert sweep(STORAGE, out, markers.values()) == 1
    assert STORAGE.exists(f"{out}/{parts[0]}") and not STORAGE.exists(f"{out}/{parts[1]}")


def test_sweep_deletes_what_no_marker_names_and_nothing_else(out):
    kept = "measurements/responses/date=2026-01-01/a-111111111111.parquet"
    stays = [
        kept,
        "measurements/rejects/date=2026-01-01/duplicates-333333333333.parquet",
        "findings/responses/date=2026-01-01/a-444444444444.parquet",
        "measurements/notes.txt",
        "run.json",
    ]
    goes = [
        "measurements/responses/date=2026-01-01/a-222222222222.parquet",
        "measurements/rejects/date=2026-01-02/b-555555555555.parquet",
        "units/.a.json.77.partial",
        "measurements/sentences/date=2026-01-01/.a-666666666666.parquet.77.partial",
    ]
    for path in stays + goes:
        STORAGE.write(f"{out}/{path}", b"x")
    assert sweep(STORAGE, out, [marker("a", [kept])]) == len(goes)
    left = {found.url.removeprefix(f"{out}/") for found in STORAGE.list(out)}
    assert left == set(stays)


def test_success_comes_last_and_takes_the_progress_away(out):
    write_progress(STORAGE, out, {"n_units": 2})
    assert read_success(STORAGE, out) is None
    finish(STORAGE, out, {"totals": {}})
    assert read_success(STORAGE, out) == {"totals": {}}
    assert [found.url for found in STORAGE.list(out)] == [f"{out}/_SUCCESS"]


def test_read_must_equal_audited_plus_rejected_in_every_counting(out, logs):
    run = create(out, logs)
    markers = {"a": marker("a"), "b": marker("b")}
    right = {"n_audited": 2, "n_rejected": 2, "n_sentences": 9}
    check_conservation(run, markers, right, right)
    for counted, recounted in (
        (right, right | {"n_audited": 1}),
        (right | {"n_rejected": 3}, right),
    ):
        with pytest.raises(JobError, match="4 rows were read"):
            check_conservation(run, markers, counted, recounted)
    with pytest.raises(JobError, match="n_sentences is 9 by the judge and 8"):
        check_conservation(run, markers, right, right | {"n_sentences": 8})


def test_a_judgement_cannot_change_what_was_measured(out, logs):
    run = create(out, logs, config=Config())
    check_measured(out, run, Config())
    with pytest.raises(ConfigError, match=r"scorer\.name"):
        check_measured(out, run, Config(scorer=ScorerConfig(name="another")))
