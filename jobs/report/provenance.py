"""Where the page comes from: the run's facts, its files, and the commands that make it again."""

import json
import shlex
from typing import Any

from detector.calibration import Reference
from jobs.commit import Run
from jobs.config import Config
from jobs.errors import ConfigError
from jobs.report.excerpt import label
from jobs.report.page import File, Provenance, Statistic
from jobs.report.wording import FEATURES, percent
from jobs.storage import mask
from jobs.threshold import resolve

MAX_FILES = 20
_ELSEWHERE = ("storage", "scorer.cache_dir", "workers.address")
"""Settings of the machine and of its credentials, which are not part of what was done."""


def collect_provenance(run: Run, reference: Reference, config: Config, out: str) -> Provenance:
    """Fill the last section of the page from run.json and profile.json."""
    facts = {
        "Run": run.run_id,
        "Started": run.started_at,
        "Scorer": str(run.scorer.get("name", "")),
        "Scorer fingerprint": str(run.scorer.get("fingerprint", "")),
        "Window": f"{run.scorer['window_tokens']:,} tokens" if run.scorer.get("window_tokens") else "",
        "Arithmetic": str(run.scorer.get("dtype", "")),
        "Prompt profile": str(run.config.get("profile", "")),
        "Leave-one-out": str(run.config.get("loo", "")),
        "Texts redacted by": str(run.config.get("redact") or ""),
        "Units of work": f"{run.n_units:,}",
        "Deciding method": reference.deciding_method,
        "Evidence floor": f"{config.judge.evidence_floor_nats:g} nats per token",
    }
    bundle = run.scorer.get("bundle")
    if bundle:
        facts["Bundle"] = f"{bundle['digest']}, trained on {bundle['data']}"
    if reference.threshold is not None and reference.target_fpr is None:
        facts["Threshold"] = f"{reference.threshold:.4f}, from run {reference.threshold_from}"
    elif reference.threshold is not None and reference.target_fpr is not None:
        facts["Threshold"] = f"{reference.threshold:.4f}, operating point of {reference.threshold_from}"
        facts["False alarms"] = f"{percent(reference.target_fpr)} of supported sentences of its training data"
    if reference.flag_budget is not None:
        facts["Flag budget"] = f"{percent(reference.flag_budget)} of sentences"
    versions = {"leadline": run.leadline_version, **run.versions}
    return Provenance(
        facts=tuple((name, value) for name, value in facts.items() if value),
        versions=tuple((name, str(value)) for name, value in versions.items()),
        statistics=tuple(
            Statistic(name, FEATURES[name], scale.mean, scale.sd)
            for name, scale in reference.sentences.items()
        ),
        statistics_from=reference.statistics_from,
        n_statistics_sentences=reference.n_sentences,
        files=tuple(_file(file) for file in run.files[:MAX_FILES]),
        n_files_hidden=max(len(run.files) - MAX_FILES, 0),
        audit_command=_audit_command(run),
        judge_command=shlex.join(["leadline", "judge", mask(out), *_other_threshold(bundle, reference)]),
        has_storage_options=bool(run.config.get("storage")),
    )


def _file(file: dict[str, Any]) -> File:
    form = " ".join(str(file[key]) for key in ("format", "compression") if file.get(key))
    url = label(mask(str(file.get("url", "")))) or ""
    return File(url, file.get("size"), label(str(file.get("etag", ""))) or "", form)


def _other_threshold(bundle: dict[str, Any] | None, reference: Reference) -> list[str]:
    """Options of another judgement of the same run."""
    rates = [rate for rate, _ in bundle["operating_points"]] if bundle and reference.bundle else []
    other = next((rate for rate in sorted(rates) if rate != reference.target_fpr), None)
    return ["--set", "judge.flag_budget=0.05"] if other is None else ["--target-fpr", f"{other:g}"]


def _audit_command(run: Run) -> str:
    """The command line that measures the same logs again, with every setting that is not the default."""
    words = ["leadline", "audit", *(mask(log) for log in run.logs), "--out", "NEW_OUT"]
    plain, filled = (dict(_leaves(config.model_dump(mode="json"))) for config in (Config(), _filled_in(run)))
    for key, value in _leaves(run.config):
        usual = value in (plain.get(key, {}), filled.get(key, {})) and value != "none"
        if key not in _ELSEWHERE and not key.startswith("storage.") and not usual:
            words += ["--set", f"{key}={json.dumps(value, ensure_ascii=False)}"]
    return shlex.join(words)


def _filled_in(run: Run) -> Config:
    """What the defaults came to in this run."""
    loo = {"loo": run.config.get("loo", "exact")}
    try:
        return resolve(Config.model_validate(loo), run)
    except ConfigError:  # the defaults are not to be had here
        return Config()


def _leaves(tree: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    leaves: list[tuple[str, Any]] = []
    for key, value in tree.items():
        # `fields` maps names of the user's own: it is one setting, given whole.
        if isinstance(value, dict) and key != "fields":
            leaves += _leaves(value, f"{prefix}{key}.")
        else:
            leaves.append((prefix + key, value))
    return leaves
