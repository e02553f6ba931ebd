"""The page in a real browser: it opens from disk, its script runs clean, and nothing is fetched."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from jobs.config import load_config
from jobs.report import write_report
from jobs.storage import Storage
from tests.jobs.report.fake_run import Answer, Reject, Said, write_fake_run

HOSTILE = "<img src=http://127.0.0.1:9/x.png onerror=alert(1)><script>fetch('http://127.0.0.1:9/')</script>"
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --enable-logging=stderr --window-size=1280,1600"
).split()


@pytest.fixture(scope="module")
def browser() -> str:
    found = shutil.which("chromium")
    if found is None:
        pytest.skip("needs Debian's chromium")
    return found


def test_the_page_opens_without_console_errors_and_without_a_request(browser: str, tmp_path: Path) -> None:
    said = (Said(HOSTILE, 2.0), Said("A second sentence.", -1.0))
    write_fake_run(str(tmp_path / "out"), [Answer(said)], [Reject("malformed_row", HOSTILE)])
    page = write_report(str(tmp_path / "out"), Storage(), load_config(None, [], {}))
    done = subprocess.run(
        [
            browser,
            *FLAGS,
            f"--user-data-dir={tmp_path / 'browser'}",
            f"--log-net-log={tmp_path / 'net.json'}",
            f"--screenshot={tmp_path / 'page.png'}",
            f"file://{page}",
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert "CONSOLE" not in done.stderr
    assert (tmp_path / "page.png").stat().st_size > 10_000
    log = json.loads((tmp_path / "net.json").read_text())
    urls = {event.get("params", {}).get("url", "") for event in log["events"]}
    assert not {url for url in urls if "127.0.0.1" in url}
