import pytest


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    """One folder for all examples of a hypothesis test, which overwrite the same file."""
    return tmp_path_factory.mktemp("scratch")
