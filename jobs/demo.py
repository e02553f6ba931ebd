"""The bundled sample logs, and how an earlier demo is taken away again."""

from importlib.resources import files
from pathlib import Path

from jobs.commit import PROGRESS, RUN, SUCCESS, find_run
from jobs.config import Config
from jobs.errors import ConfigError
from jobs.storage import Storage, join, mask

SMALL_UNITS = ("read.unit_bytes=4096", "read.unit_rows=2")
"""Settings that cut the samples into units of a few answers, so that something is seen to happen."""

_SUFFIXES = {".jsonl", ".parquet"}
_TABLES = ("measurements", "findings", "texts", "summary")
_WRITTEN = ("profile.json", PROGRESS, "lease", "units", *_TABLES, "report")


def sample_logs() -> list[str]:
    """Paths of the log files that are installed with the package."""
    folder = Path(str(files("jobs"))) / "samples"
    return [str(path) for path in sorted(folder.iterdir()) if path.suffix in _SUFFIXES]


def delete_run(out: str, config: Config) -> None:
    """Delete the run in `out`, and nothing that Leadline did not write. Nothing there is fine.

    Raises ConfigError where `out` holds something that is not a run.
    """
    storage = Storage(config.storage)
    if find_run(storage, out) is None:
        if next(storage.list(out), None) is not None:
            raise ConfigError(
                f"{mask(out)}: not the OUT of a run, so --fresh deletes nothing; choose another --out"
            )
        return
    # _SUCCESS first, run.json last: what a killed deletion leaves is an unfinished run, and known as one.
    storage.delete(join(out, SUCCESS))
    for name in _WRITTEN:
        for found in list(storage.list(join(out, name))):
            storage.delete(found.url)
    storage.delete(join(out, RUN))
