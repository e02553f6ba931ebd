"""What flags rest on: the method that decides, a reference that fits, and where the threshold comes from."""

from typing import Any

from detector.calibration import TARGET_FPR, Reference, operating_threshold
from detector.errors import ProfileError
from detector.methods import METHODS
from jobs.bundles import operating_points
from jobs.commit import Run
from jobs.config import Config
from jobs.errors import ConfigError
from jobs.storage import Storage, mask


def resolve(config: Config, run: Run) -> Config:
    """Settings with everything that is `auto` filled in for this run. Raises ConfigError."""
    used = run.scorer.get("bundle", {}).get("digest")
    digest = used if config.bundle == "auto" else config.bundle_digest
    if config.loo == "auto":
        config = config.model_copy(update={"loo": run.measured_by.get("loo", "exact")})
    return config.resolved(digest, reads_attention=reads_attention(run.scorer))


def reads_attention(scorer: dict[str, Any]) -> bool:
    """Whether a run measures its scorer's attention; `scorer` as in run.json, of an old run too."""
    return bool(scorer.get("reads_attention", False))


def operating_point(config: Config, scorer: dict[str, Any]) -> tuple[float, float] | None:
    """False-alarm rate and threshold to flag at, or None where a budget does it; settings are resolved.

    `scorer` as in run.json. Raises ProfileError for a rate that was not measured for its bundle.
    """
    if not METHODS[config.judge.deciding_method].trained or config.judge.flag_budget is not None:
        return None
    rate = TARGET_FPR if config.judge.target_fpr is None else config.judge.target_fpr
    return rate, operating_threshold(operating_points(scorer), rate)


def load_reference(path: str, storage: Storage) -> Reference:
    """Read a profile file (any URL). Raises ProfileError, naming the file, where it is none."""
    try:
        return Reference.from_json(storage.read(path))
    except FileNotFoundError:
        raise ProfileError(
            f"profile {mask(path)}: no such file; every run writes one to OUT/profile.json"
        ) from None
    except ProfileError as error:
        raise ProfileError(f"profile {mask(path)}: {error}") from None


def threshold_of(reference: Reference, deciding: str) -> float | None:
    """The threshold that a reference holds for this method."""
    return reference.threshold if reference.deciding_method == deciding else None


def check_origin(reference: Reference, run: Run) -> None:
    """Raise ProfileError for a reference of another scorer, bundle, prompt profile or leave-one-out mode."""
    bundle = run.scorer.get("bundle", {}).get("digest")
    for what, theirs, ours in (
        ("bundle", reference.bundle, bundle if reference.bundle else None),
        ("scorer fingerprint", reference.scorer_fingerprint, run.scorer["fingerprint"]),
        ("prompt profile", reference.profile, run.measured_by["profile"]),
        ("loo", reference.loo, run.measured_by["loo"]),
    ):
        if theirs != ours:
            raise ProfileError(
                f"reference profile of run {reference.statistics_from}: its {what} is {theirs}, here it is "
                f"{ours}; leave --profile out, or use the profile.json of a run with the same settings"
            )


def check_features(config: Config, run: Run, reference: Reference) -> None:
    """Raise ProfileError or ConfigError for a method that reads what the reference has no statistics of."""
    for method in config.methods:
        for name in () if METHODS[method].trained else METHODS[method].features:
            if name in reference.sentences:
                continue
            if reference.statistics_from != run.run_id:
                raise ProfileError(
                    f"reference profile of run {reference.statistics_from}: no statistics of {name}, which "
                    f"method {method} reads; leave --profile out, or leave {method} out of --methods"
                )
            raise ConfigError(
                f"setting methods: {method} reads {name}, which this run did not measure (loo "
                f"{reference.loo}); leave {method} out of --methods, or audit with --loo exact"
            )
