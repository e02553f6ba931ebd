"""The command line: what reaches the job, what is printed, which exit code comes back."""

import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import jobs.audit
from detector.errors import ScorerError
from jobs import cli
from jobs.errors import ConfigError, JobError
from jobs.tables import REASONS


@pytest.fixture
def leadline(monkeypatch, capsys):
    """Run the command in this process. Gives the exit code, stdout and stderr."""

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["leadline", *map(str, words)])
        code = cli.main()
        printed = capsys.readouterr()
        return SimpleNamespace(code=code, out=printed.out, err=printed.err)

    return run


@pytest.fixture
def audited(monkeypatch):
    """Replace the job by one that notes its arguments; `.fails` makes it raise."""
    noted = SimpleNamespace(fails=None, share=0.25, threshold=None)

    def audit(logs, out, config, *, profile=None, on_progress=None):
        noted.logs, noted.out, noted.config, noted.profile = logs, out, config, profile
        if noted.fails:
            raise noted.fails
        return result(out, noted.share, noted.threshold)

    monkeypatch.setattr(jobs.audit, "audit", audit)
    return noted


@pytest.fixture
def rejudged(monkeypatch):
    """Replace judging again by something that collects the settings it was called with."""
    seen = []
    monkeypatch.setattr(
        jobs.audit, "rejudge", lambda out, config, profile: seen.append(config) or result(out, 0.1)
    )
    return seen


def result(out, share, threshold=None):
    totals = {f"n_{reason}": 0 for reason in REASONS} | {
        "n_read": 1210,
        "n_audited": 1200,
        "n_rejected": 10,
        "n_no_passages": 8,
        "n_malformed_row": 2,
        "n_responses": 1200,
        "n_flagged_responses": 300,
        "n_sentences": 4000,
        "n_flagged_sentences": 400,
        "flagged_rate": share,
        "ci_low": 0.226,
        "ci_high": 0.275,
    }
    rests_on = threshold or jobs.audit.Threshold("gasp", 1.5, "r1", 0.1, None, None)
    return jobs.audit.AuditResult(out, "r1", totals, share, f"{out}/report/index.html", 3, 3, rests_on)


def test_every_option_becomes_its_setting(leadline, audited):
    ran = leadline(
        *("audit", "a.jsonl", "b.jsonl", "--out", "o", "--scorer", "tiny", "--prompt-profile", "gasp-v2"),
        *("--loo", "off", "--methods", "gap,jsd_none", "--methods", "length", "--limit", 7, "--workers", 2),
        *("--set", "judge.deciding_method=gap", "--store-text", "none", "--fail-over", 0.5),
        *("--address", "10.0.0.1:6379", "--profile", "last-week.json", "--bundle", "s3://b/head"),
    )
    assert ran.code == 0
    config = audited.config
    assert (audited.logs, audited.out, audited.profile) == (["a.jsonl", "b.jsonl"], "o", "last-week.json")
    assert (config.scorer.name, config.profile, config.loo) == ("tiny", "gasp-v2", "off")
    assert config.methods == ("gap", "jsd_none", "length")
    assert (config.read.limit, config.workers.count, config.workers.address) == (7, 2, "10.0.0.1:6379")
    assert (config.store_text, config.fail_over, config.judge.deciding_method) == ("none", 0.5, "gap")
    assert config.bundle == "s3://b/head"
    leadline("audit", "a", "--out", "o", "--target-fpr", 0.02)
    assert audited.config.judge.target_fpr == 0.02


def test_options_go_over_set_and_set_over_the_file(leadline, audited, tmp_path):
    file = tmp_path / "night.yaml"
    file.write_text("scorer: {name: from-file, dtype: float32}\nread: {limit: 1}\nworkers: {count: 1}\n")
    leadline(
        *("audit", "a", "--out", "o", "--config", file),
        *("--set", "read.limit=2", "--set", "workers.count=2", "--workers", 3),
    )
    assert audited.config.scorer.name == "from-file"
    assert audited.config.scorer.dtype == "float32"
    assert (audited.config.read.limit, audited.config.workers.count) == (2, 3)


def test_the_verdict_says_what_was_read_what_is_flagged_and_what_the_threshold_is_not(leadline, audited):
    ran = leadline("audit", "a", "--out", "o")
    assert ran.code == 0
    assert ran.out.splitlines() == [
        "1,210 rows read: 1,200 answers audited, 10 rejected (malformed_row 2, no_passages 8)",
        "300 of 1,200 answers flagged: 25.0% (95% interval 22.6% to 27.5%); 400 of 4,000 sentences",
        "Judged by gasp; the threshold is a budget (the worst 10% of this run's sentences), "
        "not an error rate.",
        "page    o/report/index.html",
        "tables  o/findings and o/summary",
    ]


def test_the_verdict_of_a_bundle_names_its_false_alarm_rate_and_where_it_was_measured(leadline, audited):
    audited.threshold = jobs.audit.Threshold("ensemble", 0.6, "bundle b0", None, 0.05, "Made-Up QA, English")
    ran = leadline("audit", "a", "--out", "o")
    assert ran.out.splitlines()[2] == (
        "Judged by ensemble; the threshold is an operating point: 5% false alarms on its training data "
        "(Made-Up QA, English), not measured on this traffic."
    )
    assert len(ran.out.splitlines()) == 5


def test_nothing_audited_is_not_called_zero_percent_flagged(leadline, audited):
    audited.share = None
    ran = leadline("audit", "a", "--out", "o", "--fail-over", 0)
    assert ran.code == 0
    assert "None could be audited" in ran.out
    assert "%" not in ran.out


@pytest.mark.parametrize("limit, code", [(0.24, 3), (0.25, 0)])
def test_a_share_over_fail_over_exits_with_3_and_still_prints_the_verdict(leadline, audited, limit, code):
    ran = leadline("audit", "a", "--out", "o", "--fail-over", limit)
    assert ran.code == code
    assert "page    o/report/index.html" in ran.out
    assert ("over --fail-over 24.0%" in ran.err) == (code == 3)


@pytest.mark.parametrize(
    "error, code",
    [
        (ConfigError("setting x: y"), 2),
        (ScorerError("scorer x: no model"), 2),
        (JobError("2 of 3 units failed"), 1),
        (PermissionError(13, "denied"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_what_goes_wrong_is_one_line_and_a_code(leadline, audited, error, code):
    audited.fails = error
    ran = leadline("audit", "a", "--out", "o")
    assert (ran.code, ran.out) == (code, "")
    assert len(ran.err.splitlines()) == 1
    assert "Traceback" not in ran.err


def test_an_interrupted_run_says_how_to_go_on(leadline, audited):
    audited.fails = KeyboardInterrupt()
    assert "run the same command again to go on" in leadline("audit", "a", "--out", "o").err


def test_an_error_that_nobody_foresaw_names_its_kind_and_debug_shows_where(leadline, audited):
    audited.fails = ZeroDivisionError("division by zero")
    ran = leadline("audit", "a", "--out", "o")
    assert "ZeroDivisionError: division by zero" in ran.err
    assert "--debug" in ran.err
    assert "Traceback" in leadline("audit", "a", "--out", "o", "--debug").err


def test_an_error_message_cannot_drive_the_terminal(leadline, audited):
    audited.fails = JobError("file \x1b[2J\u202e.jsonl")
    ran = leadline("audit", "a", "--out", "o")
    assert "\x1b" not in ran.err and "\u202e" not in ran.err
    assert "\\x1b[2J\\u202e" in ran.err


@pytest.mark.parametrize(
    "words, wanted",
    [
        (["audit"], "LOGS"),
        (["audit", "a"], "--out"),
        (["audit", "a", "--out", "o", "--frob"], "--frob"),
        (["audit", "a", "--out", "o", "--limit", "many"], "integer"),
        (["audit", "a", "--out", "o", "--limit", "0"], "read.limit"),
        (["audit", "a", "--out", "o", "--methods", "refind"], "refind"),
        (["audit", "a", "--out", "o", "--set", "judge.budget=1"], "judge.budget"),
        (["audit", "a", "--out", "o", "--config", "absent.yaml"], "absent.yaml"),
        (["audit", "a", "--out", "o", "--profile", "gasp-v2"], "--prompt-profile"),
        (["audit", "a", "--out", "o", "--prompt-profile", "p.json"], "profile"),
        (["dance"], "dance"),
        (["submit", "s3://b/l", "--out", "s3://b/o"], "--address"),
    ],
)
def test_usage_and_configuration_errors_exit_with_2_and_say_what(leadline, audited, words, wanted):
    ran = leadline(*words)
    assert (ran.code, ran.out) == (2, "")
    assert len(ran.err.splitlines()) == 1
    assert ran.err.startswith("leadline: error: ")
    assert wanted in ran.err


@pytest.mark.parametrize(
    "log, out",
    [
        ("logs", "logs"),
        ("logs", "logs/audit"),
        ("logs/", "./logs/../logs/audit"),
        (".", "audit"),
        ("s3://bucket/logs/", "s3://bucket/logs/audit"),
        ("s3a://bucket", "s3://bucket/audit"),
    ],
)
def test_an_out_inside_its_logs_is_refused_before_anything_is_read(leadline, audited, log, out):
    ran = leadline("audit", "elsewhere", log, "--out", out)
    assert ran.code == 2
    assert "lies in the logs" in ran.err
    assert not hasattr(audited, "logs")


@pytest.mark.parametrize("log, out", [("logs", "logs-audit"), ("s3://b/logs", "s3://b/logs2"), ("a/b", "a")])
def test_an_out_beside_its_logs_is_fine(leadline, audited, log, out):
    assert leadline("audit", log, "--out", out).code == 0


def test_judging_again_starts_from_the_settings_of_the_run(leadline, rejudged, tmp_path):
    from jobs.commit import create_run
    from jobs.config import load_config
    from jobs.storage import Storage

    out = str(tmp_path / "out")
    then = load_config(
        None, ["judge.deciding_method=gap", "judge.evidence_floor_nats=0.2"], {"methods": ["gap"]}
    )
    create_run(Storage(), out, ["logs"], then, {"fingerprint": "f"}, [], 0)
    assert leadline("judge", out, "--set", "judge.flag_budget=0.3").code == 0
    (config,) = rejudged
    assert (config.methods, config.judge.deciding_method) == (("gap",), "gap")
    assert (config.judge.flag_budget, config.judge.evidence_floor_nats) == (0.3, 0.2)


@pytest.mark.parametrize(
    ("then", "words", "expected"),
    [
        ([], ["--target-fpr", "0.02"], (None, 0.02)),
        (["judge.flag_budget=0.2"], ["--target-fpr", "0.02"], (None, 0.02)),
        (["judge.target_fpr=0.02"], ["--set", "judge.flag_budget=0.2"], (0.2, None)),
        (["judge.target_fpr=0.02"], ["--fail-over", "0.5"], (None, 0.02)),
    ],
)
def test_a_threshold_said_when_judging_again_replaces_the_one_of_the_run(
    leadline, rejudged, tmp_path, then, words, expected
):
    from jobs.commit import create_run
    from jobs.config import load_config
    from jobs.storage import Storage

    config = load_config(None, then, {}).resolved("b0" * 6, reads_attention=True)
    create_run(Storage(), str(tmp_path / "o"), ["logs"], config, {"fingerprint": "f"}, [], 0)
    assert leadline("judge", tmp_path / "o", *words).code == 0
    (found,) = rejudged
    assert (found.judge.flag_budget, found.judge.target_fpr) == expected
    assert (found.bundle, found.judge.deciding_method) == ("auto#" + "b0" * 6, "ensemble")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--methods", "gasp"], "gasp"),
        (["--methods", "gap,blend"], "blend"),
        (["--methods", "gap,blend", "--set", "judge.deciding_method=gap"], "gap"),
    ],
)
def test_of_methods_given_when_judging_again_the_first_decides(leadline, rejudged, tmp_path, words, expected):
    from jobs.commit import create_run
    from jobs.config import load_config
    from jobs.storage import Storage

    config = load_config(None, [], {}).resolved(None, reads_attention=True)
    assert config.judge.deciding_method == "blend"
    create_run(Storage(), str(tmp_path / "o"), ["logs"], config, {"fingerprint": "f"}, [], 0)
    assert leadline("judge", tmp_path / "o", *words).code == 0
    (found,) = rejudged
    assert found.resolved(None, reads_attention=True).judge.deciding_method == expected


def test_judging_where_no_run_is_says_so(leadline, tmp_path):
    ran = leadline("judge", tmp_path)
    assert ran.code == 2
    assert "no run.json" in ran.err


def test_a_dry_submission_prints_the_command_and_contacts_nobody(leadline):
    ran = leadline("submit", "s3://b/l", "--out", "s3://b/o", "--workers", 4, "--dry-run")
    assert ran.code == 0
    request = json.loads(ran.out)
    assert (
        request["entrypoint"] == "leadline audit s3://b/l --out s3://b/o --set workers.count=4 --address auto"
    )


def test_a_submission_is_of_the_day_it_was_submitted_on(leadline):
    words = ("--out", "s3://b/{date}", "--profile", "s3://b/{yesterday}/profile.json", "--date", "2026-12-01")
    ran = leadline("submit", "s3://b/dt={yesterday}/", *words, "--dry-run")
    entrypoint = json.loads(ran.out)["entrypoint"]
    assert "s3://b/dt=2026-11-30/ --out s3://b/2026-12-01 " in entrypoint
    assert "--profile s3://b/2026-11-30/profile.json" in entrypoint and ran.err == ""


def test_days_are_written_out_before_the_job_begins(leadline, audited):
    ran = leadline("audit", "a/{yesterday:%Y/%m}", "b/{x,y}", "--out", "o/{today}", "--date", "2027-01-01")
    assert ran.code == 0
    assert (audited.logs, audited.out) == (["a/2026/12", "b/{x,y}"], "o/2027-01-01")


def test_the_day_that_nobody_set_is_told_once(leadline, audited):
    ran = leadline("audit", "a/{today}", "--out", "o/{today}")
    assert audited.logs == [audited.out.replace("o/", "a/")]
    assert ran.err == f"leadline: {{today}} is {audited.out[2:]}, in UTC; --date sets another day\n"


@pytest.mark.parametrize(
    "words",
    [("audit", "a", "--out"), ("plan",), ("status",), ("judge",), ("report",), ("submit", "/a", "--out")],
)
def test_a_day_that_is_not_one_stops_every_command(leadline, audited, words):
    ran = leadline(*words, "o/{tomorow}")
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith("leadline: error: {tomorow}: not known; days are written {today}")


def test_a_plan_takes_the_options_of_the_audit(leadline, tmp_path, tiny_scorer_dir):
    row = {"question": "Who?", "contexts": ["Ada built it."], "answer": "Ada."}
    (tmp_path / "2026-11-30.jsonl").write_text(json.dumps(row) + "\n")
    words = (
        f"{tmp_path}/{{date}}.jsonl",
        "--date",
        "2026-11-30",
        "--scorer",
        tiny_scorer_dir,
        "--loo",
        "off",
    )
    ran = leadline(
        "plan", *words, "--tokens-per-second", 10, "--price-per-hour", 2, "--output-format", "json"
    )
    assert ran.code == 0, ran.err
    estimate = json.loads(ran.out)["estimate"]
    hours = estimate["tokens"]["value"] / 10 / 3600
    assert estimate["worker_hours"]["value"] == pytest.approx(hours)
    assert estimate["cost"]["value"] == pytest.approx(2 * hours)


def test_a_plan_refuses_what_cannot_redact(leadline, tmp_path):
    ran = leadline("plan", tmp_path, "--redact", "no.such:function")
    assert ran.code == 2
    assert "setting redact: no.such:function cannot be imported" in ran.err


def test_the_demo_audits_the_bundled_logs_with_the_defaults(leadline, audited):
    assert leadline("demo").code == 0
    assert audited.out == "leadline-demo"
    assert audited.logs and all("samples" in log for log in audited.logs)
    assert audited.config.scorer.name == "smollm2-135m"


def test_a_fresh_demo_deletes_a_run_and_nothing_else(leadline, audited, tmp_path):
    from jobs.commit import create_run
    from jobs.config import Config
    from jobs.storage import Storage

    out = tmp_path / "demo"
    create_run(Storage(), str(out), ["logs"], Config(), {"fingerprint": "f"}, [], 0)
    tables = (f"{name}/date=2026-11-30/u.parquet" for name in ("findings/sentences", "texts"))
    for name in ("_SUCCESS", *tables, "notes.txt", "run.jsonl"):
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text("x")
    assert leadline("demo", "--out", out, "--fresh").code == 0
    assert sorted(path.name for path in out.rglob("*") if path.is_file()) == ["notes.txt", "run.jsonl"]


def test_a_fresh_demo_refuses_a_folder_that_is_no_run(leadline, audited, tmp_path):
    (tmp_path / "thesis.txt").write_text("x")
    ran = leadline("demo", "--out", tmp_path, "--fresh")
    assert ran.code == 2
    assert (tmp_path / "thesis.txt").exists()


def test_the_version_and_the_help_are_printed(leadline):
    assert leadline("--version").out.startswith("leadline 0.")
    assert "Commands" in leadline().out
    assert "--fail-over" in leadline("audit", "--help").out


def test_off_a_terminal_the_drivers_log_lines_are_shown(leadline, monkeypatch):
    import logging

    def audit(logs, out, config, *, profile=None, on_progress=None):
        assert on_progress is None
        logging.getLogger("leadline").info("1 of 3 units")
        return result(out, 0.1)

    monkeypatch.setattr(jobs.audit, "audit", audit)
    assert leadline("audit", "a", "--out", "o").err.endswith("leadline: 1 of 3 units\n")
    assert not logging.getLogger("leadline").handlers


def test_on_a_terminal_a_table_follows_the_run(tmp_path):
    """In a process of its own, whose stderr is a real terminal."""
    code = f"""
import sys, jobs.audit
from jobs.dispatch import Progress
sys.path.insert(0, {str(Path.cwd())!r})
from tests.jobs.test_cli import result
def audit(logs, out, config, *, profile=None, on_progress=None):
    on_progress(Progress("r1", "", 3, 1, 2, 2, 500, 490, 10, {{}}, 1234.0, 60.0, {{}}))
    return result(out, 0.1)
jobs.audit.audit = audit
sys.argv = ["leadline", "audit", "a", "--out", "o"]
from jobs.cli import main
sys.exit(main())
"""
    ours, theirs = pty.openpty()
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "120"}
    process = subprocess.Popen(
        [sys.executable, "-c", code], stderr=theirs, stdout=subprocess.PIPE, env=environment
    )
    os.close(theirs)
    shown = b""
    try:
        while piece := os.read(ours, 4096):
            shown += piece
    except OSError:  # how Linux says that the terminal's other side is closed
        pass
    os.close(ours)
    verdict = process.communicate()[0]
    assert process.returncode == 0
    assert b"1 of 3" in shown and b"1,234" in shown and b"1 min" in shown
    assert verdict.startswith(b"1,210 rows read")


def test_status_prints_json_for_machines(leadline, tmp_path):
    from jobs.commit import create_run
    from jobs.config import Config
    from jobs.storage import Storage

    create_run(Storage(), str(tmp_path / "o"), ["logs"], Config(), {"fingerprint": "f"}, [], 2)
    ran = leadline("status", tmp_path / "o", "--output-format", "json")
    assert json.loads(ran.out)["n_units"] == 2
    assert "units   0 of 2 done" in leadline("status", tmp_path / "o").out
