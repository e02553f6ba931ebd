"""The bundle that a run uses: found before any log is read, and what run.json remembers of it.

A run is judged again without its bundle, so what a judgement and its page need is kept with the run.
"""

from typing import TYPE_CHECKING, Any

from jobs.config import Config
from jobs.errors import ConfigError
from jobs.storage import Storage, join, mask

if TYPE_CHECKING:
    from detector.bundle import Bundle


def find_bundle(config: Config, scorer: dict[str, Any], storage: Storage) -> "Bundle | None":
    """The bundle that `config` asks for, checked against the scorer that `identify_scorer` told of.

    Raises ProfileError for a bundle of another scorer or prompt profile, or none at all; ConfigError where
    its content is not the pinned one or the run leaves out passes that it reads.
    """
    if config.bundle_place == "none":
        return None
    from detector.identity import ScorerInfo, shipped_bundle

    if config.bundle_place == "auto" and config.bundle_digest is None and not shipped_bundle(scorer["name"]):
        return None  # before the import below, which takes seconds (transformers)
    from detector.bundle import embedded

    if config.bundle_place == "auto":
        bundle = embedded(scorer["name"], scorer["fingerprint"], config.profile)
    else:
        bundle = read_bundle(config.bundle_place, storage)
        bundle.check(ScorerInfo(**scorer), config.profile)
        bundle.head()  # parts that make no head would be found out by every worker
    found = bundle and bundle.digest
    if config.bundle_digest not in (None, found):
        raise ConfigError(
            f"setting bundle: {config.bundle_digest} is asked for, there is {found or 'none'}; "
            "put the other one back, or leave the # out"
        )
    if bundle is not None and bundle.card.keep.leave_one_out and config.loo in ("masked", "off"):
        if config.bundle_place == "auto":
            return None
        what = "leaves out what this bundle reads" if config.loo == "off" else "is not what it was fitted on"
        raise ConfigError(f"setting loo: {config.loo} {what}; use --loo exact or --bundle none")
    return bundle


def read_bundle(place: str, storage: Storage) -> "Bundle":
    """The bundle in a folder or below a URL. Raises ProfileError where there is none."""
    from detector.bundle import Bundle

    if mask(place) != place:
        raise ConfigError(f"{mask(place)}: a URL with credentials would be stored with the run")
    return Bundle.read(lambda name: storage.read(join(place, name)), place)


def remember(bundle: "Bundle | None") -> dict[str, Any]:
    """What run.json keeps of a bundle, beside the scorer: all that judging and the page need."""
    if bundle is None:
        return {}
    card = bundle.card
    return {
        "bundle": {
            "digest": bundle.digest,
            "method": card.method,
            "data": card.data,
            "data_fingerprint": card.data_fingerprint,
            "limits": card.limits,
            "versions": dict(card.versions),
            "figures": dict(card.figures),
            "operating_points": sorted(card.operating_points.items()),
        }
    }


def operating_points(scorer: dict[str, Any]) -> dict[float, float]:
    """False-alarm rate -> threshold, of the bundle that run.json's `scorer` remembers; {} without one."""
    return dict(scorer.get("bundle", {}).get("operating_points", ()))
