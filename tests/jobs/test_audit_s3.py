"""The same audit on a real S3 server: logs and OUT in a bucket, the same tables as on a local disk."""

import io
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs.audit import audit
from jobs.commit import read_markers
from jobs.errors import ConfigError
from jobs.storage import Storage, join
from tests import fake_scorer
from tests.runs import N_ROWS, settings, write_logs

pytestmark = [pytest.mark.ray, pytest.mark.s3, pytest.mark.usefixtures("ray_local")]

KINDS = [f"{kind}/{name}" for kind in ("measurements", "findings") for name in ("responses", "sentences")]
KINDS += ["measurements/rejects", "summary"]


def run(logs, out, config, **more):
    return audit([logs], out, config, identify=fake_scorer.identify, load=fake_scorer.load, **more)


def rows(storage, out, kind):
    """All rows below OUT/kind without what names the place of the logs, in a fixed order."""
    found = [
        pq.read_table(io.BytesIO(storage.read(part.url)))
        for part in storage.list(join(out, kind))
        if part.url.endswith(".parquet")
    ]
    table = pa.concat_tables(found)
    names = [name for name in table.column_names if name not in ("run_id", "path", "detail")]
    return sorted(json.dumps(row, default=str) for row in table.select(names).to_pylist())


@pytest.fixture
def scene(tmp_path, seaweed):
    """Logs here and in a bucket, settings for both."""
    logs, bucket = write_logs(tmp_path / "logs"), seaweed.url()
    (tmp_path / "scorer").mkdir()
    # Workers of a Ray that runs already do not see this test's environment: the settings carry the keys.
    options = {"key": seaweed.access_key, "secret": seaweed.secret_key, "endpoint_url": seaweed.endpoint}
    for path in logs.iterdir():
        Storage(options).write(join(bucket, "logs", path.name), path.read_bytes())
    return logs, bucket, settings(tmp_path / "scorer"), settings(tmp_path / "scorer", storage=options)


def test_a_run_in_a_bucket_ends_with_the_same_tables(scene, tmp_path):
    logs, bucket, here, there = scene
    local, out = str(tmp_path / "out"), join(bucket, "out")
    expected = run(str(logs), local, here)
    result = run(join(bucket, "logs"), out, there)
    assert result.totals == expected.totals and result.totals["n_read"] == N_ROWS
    for kind in KINDS:
        assert rows(Storage(there.storage), out, kind) == rows(Storage(), local, kind), kind
    assert Storage(there.storage).exists(join(out, "_SUCCESS"))
    run_json = Storage(there.storage).read(join(out, "run.json")).decode()
    assert there.storage["secret"] not in run_json and there.storage["key"] not in run_json


def test_an_interrupted_run_in_a_bucket_is_finished_and_another_is_refused(scene):
    _, bucket, _, config = scene
    out, storage = join(bucket, "out"), Storage(config.storage)

    def stop(progress):
        if progress.n_units_done >= 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(join(bucket, "logs"), out, config, on_progress=stop)
    n_done = len(read_markers(storage, out))
    result = run(join(bucket, "logs/"), out, config)
    assert 0 < result.n_units_measured <= result.n_units - n_done
    assert result.totals["n_read"] == N_ROWS
    with pytest.raises(ConfigError, match="another run"):
        run(join(bucket, "logs", "a.jsonl"), out, config)
