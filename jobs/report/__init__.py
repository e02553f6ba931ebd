"""The page that a run ends with. It only reads OUT."""

from jobs.config import Config
from jobs.report.collect import collect
from jobs.report.page import Page
from jobs.report.render import render
from jobs.storage import Storage, join

__all__ = ["Page", "collect", "render", "write_report"]


def write_report(out: str, storage: Storage, config: Config) -> str:
    """Write OUT/report/index.html, one self-contained page, and return its URL.

    The same OUT gives the same bytes. Raises ConfigError where `out` holds no run, JobError where its files
    cannot be read.
    """
    url = join(out, "report", "index.html")
    storage.write(url, render(collect(out, storage, config)).encode())
    return url
