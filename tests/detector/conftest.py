from pathlib import Path

import pytest

from detector.scorer import Scorer


@pytest.fixture(scope="session")
def tiny(tiny_scorer_dir: Path) -> Scorer:
    return Scorer.load(str(tiny_scorer_dir))


@pytest.fixture(scope="session")
def tiny_of(tiny_scorer_dir: Path):
    """Load the tiny scorer with other settings."""
    return lambda **settings: Scorer.load(str(tiny_scorer_dir), **settings)
