"""Log lines for machines: one JSON object each, tied to run, unit and attempt."""

import json
import logging

import pytest

from jobs.console import watch
from jobs.logs import LOGGERS, bound, line_handler, logging_to

log = logging.getLogger("leadline")


def lines(capsys):
    return [json.loads(line) for line in capsys.readouterr().err.splitlines()]


def test_a_line_names_what_it_is_about(capsys):
    with logging_to(line_handler("json")):
        log.info("starting\nwith %d workers", 2)
        with bound(run_id="r1"), bound(unit_id="u1", attempt=2):
            log.warning("died")
        with bound(run_id="r1"):
            log.info("goes on")
    first, second, third = lines(capsys)
    assert first.keys() == {"time", "level", "message"}
    assert first["message"] == "starting\nwith 2 workers" and first["time"].endswith("+00:00")
    assert second | {"time": 0} == {
        "time": 0,
        "level": "warning",
        "message": "died",
        "run_id": "r1",
        "unit_id": "u1",
        "attempt": 2,
    }
    assert third["run_id"] == "r1" and "unit_id" not in third


def test_a_traceback_stays_in_its_line(capsys):
    with logging_to(line_handler("json")):
        try:
            raise ValueError("broken")
        except ValueError:
            log.exception("failed")
    (line,) = lines(capsys)
    assert line["level"] == "error" and line["traceback"].endswith("ValueError: broken")


def test_json_lines_are_written_on_a_terminal_too(capsys, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    with watch("json") as on_progress:
        assert on_progress is None
        logging.getLogger("jobs.listing").info("hello")
    assert [line["message"] for line in lines(capsys)] == ["hello"]
    assert not any(logging.getLogger(name).handlers for name in LOGGERS)


@pytest.mark.parametrize(("words", "form"), [([], "text"), (["--log-format", "json"], "json")])
def test_the_option_reaches_driver_and_workers(words, form, monkeypatch, capsys):
    import jobs.audit
    from jobs.cli import main

    def audit(logs, out, config, **_):
        assert config.log_format == form
        log.info("at work")
        raise SystemExit(7)

    monkeypatch.setattr(jobs.audit, "audit", audit)
    monkeypatch.setattr("sys.argv", ["leadline", "audit", "a", "--out", "o", *words])
    with pytest.raises(SystemExit):
        main()
    assert capsys.readouterr().err.startswith("{") == (form == "json")
