"""The driver of a run: freeze the logs, hand out their units, judge, report, and only then say _SUCCESS.

Ray holds processes, not data: a unit goes out as a few hundred bytes and comes back as its marker. Which
unit is done is decided by the markers in OUT and never by Ray, so the driver may be killed at any moment.
"""

import hashlib
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

from jobs.commit import (
    REPORT,
    Run,
    absolute,
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
)
from jobs.config import Config
from jobs.dispatch import Dispatch, Progress
from jobs.errors import JobError, first_line
from jobs.lease import hold
from jobs.logs import bound
from jobs.storage import Storage, join, mask

log = logging.getLogger("leadline")

_OBJECT_STORE_BYTES = 128 << 20  # only markers pass through it


@dataclass(frozen=True, slots=True)
class Threshold:
    """What the flags of a run rest on."""

    method: str
    value: float | None
    origin: str | None
    """The run or the bundle that it comes from."""
    flag_budget: float | None
    target_fpr: float | None
    """The false-alarm rate of a bundle's operating point, on `data`; None where the threshold is a budget."""
    data: str | None


@dataclass(frozen=True, slots=True)
class AuditResult:
    """What a finished run came to. Everything in it can be read from OUT again."""

    out: str
    run_id: str
    totals: dict[str, Any]
    """The summary's counts over the whole run: n_read, n_audited, n_rejected, n_responses, ..."""
    flagged_share: float | None
    """Flagged responses by responses; None where none was audited."""
    report_url: str
    n_units: int
    n_units_measured: int
    """Units that this call measured; 0 when the run only had to be judged, or nothing had to be done."""
    threshold: Threshold


def audit(
    logs: list[str],
    out: str,
    config: Config,
    *,
    profile: str | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    identify: Callable[[Config], dict[str, Any]] | None = None,
    load: Callable[[Config], Any] | None = None,
) -> AuditResult:
    """Audit `logs` into `out`, or finish what an earlier call with the same arguments left.

    `profile`: URL of a reference profile. `on_progress` is called about once a second while measuring.
    `identify` and `load` name the scorer here and make it in a worker; they default to the real one.

    Raises ConfigError, ScorerError or ProfileError (a bundle of another scorer, say) before any log is read;
    JobError when the run cannot be completed now, or another driver is at work in `out`. Whatever was
    measured until then is kept, and the same call goes on from there.
    """
    from jobs.bundles import find_bundle, remember
    from jobs.listing import InputFile, cut, freeze
    from jobs.redaction import load_redaction
    from jobs.threshold import check_origin, load_reference, operating_point, reads_attention

    storage, out = Storage(config.storage), absolute(out)
    load_redaction(config.redact)  # workers and judge do, later
    reference = load_reference(profile, storage) if profile else None
    scorer = (identify or identify_scorer)(config)
    bundle = find_bundle(config, scorer, storage)
    asked, digest, scorer = config, bundle and bundle.digest, scorer | remember(bundle)
    exact = bundle is not None and bundle.card.keep.leave_one_out
    config = asked.resolved(digest, reads_attention=reads_attention(scorer), exact=exact)
    if reference is None:
        operating_point(config, scorer)  # the judge looks it up too, hours later
    run = resume_run(storage, out, logs, config, scorer)
    if run is not None:
        # An older version of Leadline may have measured less.
        config = asked.resolved(digest, reads_attention=reads_attention(run.scorer), exact=exact)
        success = read_success(storage, out)
        if success is not None and success["judged_by"] == _judged_by(config, reference):
            return _result(out, run, success, n_units_measured=0)
    else:
        files = freeze(logs, storage, config.read)
        units = list(cut(files, storage, config.read))
    with hold(storage, out) as storage:
        if find_run(storage, out) != run:
            raise JobError(f"{mask(out)}: another driver began a run here just now; run the command again")
        if run is None:
            run = create_run(storage, out, logs, config, scorer, [asdict(file) for file in files], len(units))
            markers = {}
        else:
            markers = read_markers(storage, out)
            units = None
        with bound(run_id=run.run_id):
            if reference is not None:
                check_origin(reference, run)  # the judge does too, hours later
            n_missing = run.n_units - len(markers)
            if n_missing:
                if units is None:
                    check_resumable(out, run, freeze(logs, storage, config.read))
                    units = list(cut([InputFile(**file) for file in run.files], storage, config.read))
                missing = [unit for unit in units if unit.unit_id not in markers]
                log.info("%d units to measure; starting Ray and loading the scorer", len(missing))
                with _ray(config):
                    Dispatch(storage, out, run, config, load, on_progress, markers).measure(missing)
            success = _conclude(storage, out, run, config, reference)
    return _result(out, run, success, n_missing)


def rejudge(out: str, config: Config, profile: str | None = None) -> AuditResult:
    """Judge, summarise and report a measured run again, with the judge settings of `config`. Loads no model.

    Raises ConfigError where `out` holds no run or `config` would have measured it otherwise, JobError where
    its measuring is not complete or another driver is at work.
    """
    from jobs.threshold import load_reference, resolve

    storage, out = Storage(config.storage), absolute(out)
    reference = load_reference(profile, storage) if profile else None
    run = read_run(storage, out)
    config = resolve(config, run)
    check_measured(out, run, config)
    with hold(storage, out) as storage, bound(run_id=run.run_id):
        success = _conclude(storage, out, run, config, reference)
    return _result(out, run, success, n_units_measured=0)


def identify_scorer(config: Config) -> dict[str, Any]:
    """Name, fingerprint, window and dtype of the real scorer; fetches an embedded one into the cache.

    The driver may run on a machine without the workers' GPU, so its device does not matter here, and a dtype
    that depends on the device stays "auto" (each marker names the one that was used).
    """
    from detector.identity import fingerprint

    info = fingerprint(
        config.scorer.name,
        device="auto",
        dtype=config.scorer.dtype,
        window_tokens=config.scorer.window_tokens,
        cache_dir=config.scorer.cache_dir,
    )
    return asdict(info) | ({"dtype": config.scorer.dtype} if config.workers.address else {})


def _judged_by(config: Config, reference: Any) -> dict[str, Any]:
    """Everything that a judgement and its page depend on, beside the measurements."""
    tree = config.model_dump(mode="json")
    return {key: tree[key] for key in ("judge", "methods", "report")} | {
        "leadline_version": version("leadline"),
        "profile_sha256": reference and hashlib.sha256(reference.to_json().encode()).hexdigest(),
    }


def _conclude(storage: Storage, out: str, run: Run, config: Config, reference: Any) -> dict[str, Any]:
    """Judge, summarise, report, clean up, count again and write _SUCCESS, which is returned."""
    from jobs.judge import judge
    from jobs.report import write_report
    from jobs.summary import recount

    # Read from OUT once more: what is judged is what was committed, not what was reported to this process.
    markers = read_markers(storage, out)
    if len(markers) != run.n_units:
        raise JobError(
            f"{mask(out)}: {len(markers)} of {run.n_units} units are measured; run the audit again"
        )
    floors = [marker.get("noise_floor_nats", {"logprob": 0.0}) for marker in markers.values()]
    noise = max((floor["logprob"] for floor in floors), default=0.0)
    asked, config = config, _above(config, noise)
    log.info("%d units are measured; judging them", len(markers))
    judged = judge(out, storage, config, run, markers.values(), reference)
    sweep(storage, out, markers.values())  # before the page, which shows the first rejects that it finds
    write_report(out, storage, config)
    check_conservation(run, markers, judged.counts, recount(out, storage, markers.values()))
    success = {
        "run_id": run.run_id,
        "finished_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "totals": judged.counts,
        "judged_by": _judged_by(asked, reference),
        "noise_floor_nats": noise,
        "threshold": asdict(_threshold(run, judged.reference)),
        "dtypes": sorted({marker["dtype"] for marker in markers.values()}),
    }
    finish(storage, out, success)
    return success


def as_judged(config: Config, success: dict[str, Any]) -> Config:
    """The same with what the verdicts in OUT were reached with, whatever the run began with or `config` says.

    `success`: `_SUCCESS` of that run.
    """
    judge = type(config.judge).model_validate(success["judged_by"]["judge"])
    return _above(config.model_copy(update={"judge": judge}), success.get("noise_floor_nats", 0.0))


def _above(config: Config, noise_nats: float) -> Config:
    """The same, with no evidence below the noise of the scorer's log-probabilities."""
    floor = max(config.judge.evidence_floor_nats, noise_nats)
    return config.model_copy(update={"judge": config.judge.model_copy(update={"evidence_floor_nats": floor})})


def _result(out: str, run: Run, success: dict[str, Any], n_units_measured: int) -> AuditResult:
    totals = success["totals"]
    return AuditResult(
        out=out,
        run_id=run.run_id,
        totals=totals,
        flagged_share=totals["flagged_rate"],
        report_url=join(out, REPORT),
        n_units=run.n_units,
        n_units_measured=n_units_measured,
        threshold=Threshold(**success["threshold"]),
    )


def _threshold(run: Run, reference: Any) -> Threshold:
    return Threshold(
        method=reference.deciding_method,
        value=reference.threshold,
        origin=reference.threshold_from,
        flag_budget=reference.flag_budget,
        target_fpr=reference.target_fpr,
        data=run.scorer.get("bundle", {}).get("data") if reference.bundle else None,
    )


@contextmanager
def _ray(config: Config) -> Iterator[None]:
    """Ray while measuring: the one that is connected already, the cluster that was named, or one started
    here for the purpose.
    """
    import ray

    if ray.is_initialized():
        yield
        return
    # A worker without a GPU keeps its environment: Ray's coming default, and it warns until it is chosen.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    address = config.workers.address or os.environ.get("RAY_ADDRESS")
    if address:
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise JobError(f"Ray cluster {mask(address)}: cannot be joined ({first_line(error)})") from None
    else:
        asked = config.workers.count and config.workers.count * config.workers.cpus_per_worker
        try:
            ray.init(
                address="local",  # not the cluster that may happen to run on this machine
                num_cpus=asked,
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
                object_store_memory=_OBJECT_STORE_BYTES,
            )
        except Exception as error:  # Ray raises the bare type when its processes do not come up in time
            raise JobError(
                f"Ray could not be started on this machine ({first_line(error)}); "
                "is it very busy, or out of memory or disk in /tmp? Run the same command again"
            ) from None
    try:
        yield
    finally:
        ray.shutdown()
