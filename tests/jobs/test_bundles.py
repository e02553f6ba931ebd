import sys

import pytest

from detector.probe import Keep
from jobs.bundles import find_bundle
from jobs.config import Config
from jobs.errors import ConfigError
from jobs.storage import Storage
from tests import fake_scorer, stand_in_head

STORAGE = Storage({})


@pytest.fixture(autouse=True)
def stand_in(monkeypatch):
    monkeypatch.setitem(sys.modules, "detector.ensemble", stand_in_head)


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with a bundle whose head reads leave-one-out passes."""
    monkeypatch.setattr(stand_in_head.StandInHead, "keep", Keep(attention=True, layers=(2,)))
    stand_in_head.bundle(fake_scorer.FINGERPRINT).save(tmp_path / "bundle")
    return str(tmp_path / "bundle")


@pytest.mark.parametrize(
    ("loo", "why"), [("off", "leaves out what this bundle reads"), ("masked", "is not what it was fitted on")]
)
def test_a_bundle_that_reads_leave_one_out_takes_exact_alone(place, loo, why):
    config = Config(bundle=place, loo=loo)
    with pytest.raises(ConfigError, match=f"loo: {loo} {why}; use --loo exact or --bundle none"):
        find_bundle(config, fake_scorer.identify(config), STORAGE)


def test_with_exact_it_is_used(place):
    config = Config(bundle=place)
    assert find_bundle(config, fake_scorer.identify(config), STORAGE) is not None


def test_a_bundle_that_reads_none_is_used_whatever_is_measured(tmp_path):
    stand_in_head.bundle(fake_scorer.FINGERPRINT).save(tmp_path / "bundle")
    for loo in ("exact", "masked", "off"):
        config = Config(bundle=str(tmp_path / "bundle"), loo=loo)
        assert find_bundle(config, fake_scorer.identify(config), STORAGE) is not None
