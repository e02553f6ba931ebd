"""Status: what OUT alone says while a run goes on, after a kill and at the end."""

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from jobs.commit import create_run, finish, write_marker, write_progress
from jobs.config import Config
from jobs.errors import ConfigError
from jobs.lease import Holder
from jobs.status import read_status, spell_seconds
from jobs.storage import Storage
from jobs.tables import REASONS

NOW = datetime(2026, 11, 30, 3, 0, tzinfo=UTC)
CONFIG = Config()


def marker(unit_id, n_audited, rejects=()):
    rejected = dict(rejects)
    return {
        "unit_id": unit_id,
        "parts": [],
        "n_read": n_audited + sum(rejected.values()),
        "n_audited": n_audited,
        "n_rejected": sum(rejected.values()),
        "rejects": rejected,
        "n_tokens": 1000,
        "seconds": 2.0,
        "attempt": 1,
        "dtype": "float32",
    }


def progress(seconds_ago, **changes):
    return {
        "at": (NOW - timedelta(seconds=seconds_ago)).isoformat(timespec="seconds"),
        "n_units_running": 2,
        "tokens_per_second": 500.0,
        "eta_seconds": 90.0,
        "failed": {},
    } | changes


@pytest.fixture
def out(tmp_path):
    """A run of three units, two of them measured, no driver."""
    url, storage = str(tmp_path / "out"), Storage()
    scorer = {"name": "tiny", "fingerprint": "f" * 12, "window_tokens": 2048, "dtype": "float32"}
    create_run(storage, url, ["logs"], CONFIG, scorer, [{"url": "a", "size": 1, "etag": "x"}], 3, now=NOW)
    write_marker(storage, url, marker("u1", 10, {"no_passages": 2}))
    write_marker(storage, url, marker("u2", 5, {"malformed_row": 1, "no_passages": 1}))
    return url


def status(out):
    return read_status(out, CONFIG, now=NOW)


def test_a_run_without_a_driver_is_stopped_and_its_units_are_counted(out):
    found = status(out)
    assert (found.state, found.n_units, found.n_units_done) == ("stopped", 3, 2)
    assert (found.n_read, found.n_audited, found.n_rejected) == (19, 15, 4)
    assert found.rejects == {"malformed_row": 1, "no_passages": 3}
    assert found.n_computed_tokens == 2000
    assert found.tokens_per_second is None
    assert "run the same audit again" in found.to_text()


def test_spans_that_are_no_rows_are_told_and_an_old_marker_has_none(out):
    assert status(out).n_other_spans == 0 and "spans   " not in status(out).to_text()
    write_marker(Storage(), out, marker("u3", 1, {}) | {"n_other_spans": 1200})
    assert "1,200 of traces without answer or retrieval" in status(out).to_text()


def test_a_driver_that_reported_lately_is_measuring_and_its_time_left_counts_down(out):
    write_progress(Storage(), out, progress(seconds_ago=20))
    found = status(out)
    assert (found.state, found.n_units_running) == ("measuring", 2)
    assert found.seconds_left == 70.0
    assert "500 tokens/s, 1 min left" in found.to_text()


def test_a_driver_that_has_been_silent_for_minutes_is_taken_for_dead(out):
    write_progress(Storage(), out, progress(seconds_ago=121))
    assert status(out).state == "stopped"


def test_time_left_is_never_negative_and_may_be_unknown(out):
    write_progress(Storage(), out, progress(seconds_ago=100))
    assert status(out).seconds_left == 0.0
    write_progress(Storage(), out, progress(seconds_ago=1, eta_seconds=None))
    assert status(out).seconds_left is None
    assert "? left" in status(out).to_text()


def test_units_that_were_given_up_are_named_with_their_error(out):
    write_progress(Storage(), out, progress(1, failed={"u3": "OSError: connection reset"}))
    text = status(out).to_text()
    assert "1 given up" in text
    assert "failed  u3: OSError: connection reset" in text


def test_units_that_were_given_up_are_named_after_the_driver_too_but_not_once_they_are_done(out):
    write_progress(
        Storage(), out, progress(86_400, failed={"u1": "RuntimeError: late", "u3": "OSError: reset"})
    )
    found = status(out)
    assert (found.state, found.failed) == ("stopped", {"u3": "OSError: reset"})


def lease(out, seconds_ago=0, **changes):
    """As a driver writes it that renewed it so long ago."""
    holder = replace(Holder.this((NOW - timedelta(seconds=seconds_ago)).timestamp()), **changes)
    Storage().write(f"{out}/lease/000001.json", holder.to_json())
    return holder


def test_a_killed_driver_is_told_from_a_silent_one_by_its_lease(out):
    write_progress(Storage(), out, progress(seconds_ago=5))
    holder = lease(out, process_began="1")  # its process number is another process's now
    found = status(out)
    assert (found.state, found.tokens_per_second, found.driver) == ("stopped", None, str(holder))
    assert "the driver is gone; run the same audit again" in found.to_text()
    lease(out)
    write_progress(Storage(), out, progress(seconds_ago=500))
    assert status(out).state == "measuring"


def test_a_driver_on_another_machine_is_alive_while_its_lease_is_renewed(out):
    lease(out, seconds_ago=60, machine="elsewhere", pid=1)
    assert status(out).state == "measuring"
    lease(out, seconds_ago=90, machine="elsewhere", pid=1)
    assert status(out).state == "stopped"


def test_a_lease_that_is_not_understood_is_no_sign_of_anything(out):
    Storage().write(f"{out}/lease/000001.json", b'{"of": "another version"}')
    write_progress(Storage(), out, progress(seconds_ago=5))
    assert (status(out).state, status(out).driver) == ("measuring", None)


def test_the_work_is_told_in_tokens_and_time_of_workers(out):
    assert status(out).worker_seconds == 4.0
    assert "work    2,000 tokens computed in 4 s of workers" in status(out).to_text()


def test_all_units_measured_and_a_living_driver_is_judging(out):
    write_marker(Storage(), out, marker("u3", 1))
    write_progress(Storage(), out, progress(1, eta_seconds=0.0))
    assert status(out).state == "judging"


def test_a_finished_run_tells_the_totals_of_its_end_which_know_duplicates(out):
    write_marker(Storage(), out, marker("u3", 1))
    totals = {f"n_{reason}": 0 for reason in REASONS} | {
        "n_read": 20,
        "n_audited": 15,
        "n_rejected": 5,
        "n_no_passages": 3,
        "n_malformed_row": 1,
        "n_duplicate": 1,
    }
    finish(Storage(), out, {"totals": totals})
    found = status(out)
    assert found.state == "done"
    assert found.n_audited + found.n_rejected == found.n_read == 20
    assert found.rejects["duplicate"] == 1


def test_json_holds_every_field_and_stays_one_object(out):
    tree = json.loads(status(out).to_json())
    assert tree["state"] == "stopped"
    assert tree["rejects"] == {"malformed_row": 1, "no_passages": 3}


def test_a_folder_without_a_run_is_said_to_be_none(tmp_path):
    with pytest.raises(ConfigError, match=r"no run\.json"):
        read_status(str(tmp_path), CONFIG)


def test_reading_the_status_changes_nothing(out, tmp_path):
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    status(out)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    "seconds, spelt",
    [(None, "?"), (0, "0 s"), (59.4, "59 s"), (60, "1 min"), (3599, "1 h 00 min"), (11100, "3 h 05 min")],
)
def test_durations_are_spelt_for_people(seconds, spelt):
    assert spell_seconds(seconds) == spelt


def test_a_run_that_has_just_begun_is_starting_and_not_stopped(tmp_path):
    url, storage = str(tmp_path / "out"), Storage()
    scorer = {"name": "tiny", "fingerprint": "f" * 12, "window_tokens": 2048, "dtype": "float32"}
    create_run(storage, url, ["logs"], CONFIG, scorer, [{"url": "a", "size": 1, "etag": "x"}], 3, now=NOW)
    assert read_status(url, CONFIG, now=NOW + timedelta(seconds=60)).state == "starting"
    assert read_status(url, CONFIG, now=NOW + timedelta(seconds=180)).state == "stopped"
