"""How far a run is, read from OUT alone: no Ray, no model, no lock, so it may be asked from anywhere."""

import json
from collections import Counter
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any, Literal

from jobs.commit import PROGRESS, read_markers, read_run, read_success
from jobs.config import Config
from jobs.lease import LEASE, RENEW_SECONDS, Holder
from jobs.storage import Storage, join, mask
from jobs.tables import REASONS

_State = Literal["starting", "measuring", "judging", "stopped", "done"]
_ROWS = ("n_read", "n_audited", "n_rejected")
_STALE_SECONDS = 120.0  # the driver writes progress.json every 30 s; four missed ones mean that it is gone
_LEASE_STALE_SECONDS = 4 * RENEW_SECONDS


@dataclass(frozen=True, slots=True)
class Status:
    """What OUT says about its run.

    `state`: `measuring`, `judging` (all units measured, the driver is alive), `stopped` (no sign of a driver)
    or `done`. Counts come from the markers, after the end from _SUCCESS, which also knows duplicates.
    `tokens_per_second` and `seconds_left` are the driver's and None when there is none; `failed` is what the
    last one said, of units that are not done since: unit id -> error.
    """

    out: str
    run_id: str
    started_at: str
    state: _State
    n_units: int
    n_units_done: int
    n_units_running: int
    failed: dict[str, str]
    n_read: int
    n_audited: int
    n_rejected: int
    rejects: dict[str, int]
    n_other_spans: int
    """Spans of traces with neither answer nor retrieval, which are no rows."""
    n_computed_tokens: int
    worker_seconds: float
    """That workers spent on the units that are done."""
    tokens_per_second: float | None
    seconds_left: float | None
    driver: str | None
    """Who holds OUT, or held it last without giving it back."""

    def to_json(self) -> str:
        """One JSON object; the keys are the fields."""
        return json.dumps(asdict(self), indent=2)

    def to_text(self) -> str:
        """Four to eight lines for a person, and one for every unit that was given up."""
        reasons = ", ".join(f"{reason} {count:,}" for reason, count in self.rejects.items())
        lines = [
            f"run     {self.run_id} in {self.out}, begun {self.started_at}: {self.state}",
            f"units   {self.n_units_done:,} of {self.n_units:,} done, {self.n_units_running} running, "
            f"{len(self.failed)} given up",
            f"rows    {self.n_read:,} read = {self.n_audited:,} audited + {self.n_rejected:,} rejected"
            + (f" ({reasons})" if reasons else ""),
        ]
        if self.n_other_spans:
            lines.append(f"spans   {self.n_other_spans:,} of traces without answer or retrieval, no rows")
        if self.n_units_done:
            spent = spell_seconds(self.worker_seconds)
            lines.append(f"work    {self.n_computed_tokens:,} tokens computed in {spent} of workers")
        lines += [f"failed  {unit}: {error}" for unit, error in self.failed.items()]
        if self.driver is not None:
            lines.append(f"driver  {self.driver}")
        if self.tokens_per_second is not None:
            left = spell_seconds(self.seconds_left)
            lines.append(f"speed   {self.tokens_per_second:,.0f} tokens/s, {left} left")
        if self.state == "stopped":
            gone = "no driver has reported for two minutes" if self.driver is None else "the driver is gone"
            lines.append(f"next    {gone}; run the same audit again to go on")
        return "\n".join(lines)


def read_status(out: str, config: Config, now: datetime | None = None) -> Status:
    """Read the status of the run in `out`. Raises ConfigError when there is none."""
    storage = Storage(config.storage)
    run = read_run(storage, out)
    success = read_success(storage, out)
    markers = read_markers(storage, out)
    now = now or datetime.now(UTC)
    said = None if success else _read_progress(storage, out)
    progress = _current(said, now)
    holder = None if success else _read_holder(storage, out)
    # Before its first word a driver starts Ray; until it would be late, silence means nothing.
    begun = datetime.fromisoformat(run.started_at)
    silent = not markers and progress is None
    young = silent and (now - begun).total_seconds() < _STALE_SECONDS
    driven = progress is not None
    if holder is not None:
        driven = not holder.is_dead() and abs(holder.age_seconds(now.timestamp())) < _LEASE_STALE_SECONDS
        young = driven and silent
        progress = progress if driven else None
    counts: Counter[str] = Counter()
    rejects: Counter[str] = Counter()
    if success:
        counts.update({name: success["totals"][name] for name in _ROWS})
        rejects.update({reason: success["totals"][f"n_{reason}"] for reason in REASONS})
    for marker in () if success else markers.values():
        counts.update({name: marker[name] for name in _ROWS})
        rejects.update(marker["rejects"])
    return Status(
        out=mask(out),
        run_id=run.run_id,
        started_at=run.started_at,
        state=_state(bool(success), driven, young, len(markers) == run.n_units),
        n_units=run.n_units,
        n_units_done=len(markers),
        n_units_running=progress["n_units_running"] if progress else 0,
        failed={unit: why for unit, why in said["failed"].items() if unit not in markers} if said else {},
        n_read=counts["n_read"],
        n_audited=counts["n_audited"],
        n_rejected=counts["n_rejected"],
        rejects={reason: rejects[reason] for reason in REASONS if rejects[reason]},
        # A marker may be from before there were spans.
        n_other_spans=sum(marker.get("n_other_spans", 0) for marker in markers.values()),
        n_computed_tokens=sum(marker["n_tokens"] for marker in markers.values()),
        worker_seconds=round(sum(marker["seconds"] for marker in markers.values()), 1),
        tokens_per_second=progress["tokens_per_second"] if progress else None,
        seconds_left=progress["eta_seconds"] if progress else None,
        driver=None if holder is None else str(holder),
    )


def spell_seconds(seconds: float | None) -> str:
    """A duration as a person says it: `40 s`, `12 min`, `3 h 05 min`; `?` while it is not known."""
    if seconds is None:
        return "?"
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02} min"


def _state(finished: bool, driven: bool, young: bool, measured: bool) -> _State:
    if finished:
        return "done"
    if young:
        return "starting"
    if not driven:
        return "stopped"
    return "judging" if measured else "measuring"


def _read_progress(storage: Storage, out: str) -> dict[str, Any] | None:
    """What a driver last said, however long ago."""
    try:
        return json.loads(storage.read(join(out, PROGRESS)))
    except FileNotFoundError:
        return None


def _read_holder(storage: Storage, out: str) -> Holder | None:
    """The driver of the youngest lease; None where there is no lease that this version can read."""
    found = sorted(listed.url for listed in storage.list(join(out, LEASE)) if listed.url.endswith(".json"))
    try:
        return Holder(**json.loads(storage.read(found[-1]))) if found else None
    except (FileNotFoundError, ValueError, TypeError):  # given back meanwhile, or another version's
        return None


def _current(progress: dict[str, Any] | None, now: datetime) -> dict[str, Any] | None:
    """The same, or None when it is too long ago. Seconds left count down."""
    if progress is None:
        return None
    age_seconds = (now - datetime.fromisoformat(progress["at"])).total_seconds()
    if age_seconds > _STALE_SECONDS:
        return None
    if progress["eta_seconds"] is not None:
        progress["eta_seconds"] = max(0.0, progress["eta_seconds"] - max(0.0, age_seconds))
    return progress
