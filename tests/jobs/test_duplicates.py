"""Which responses were read before, against a dict of all of them."""

import random
import tempfile

import pyarrow as pa
import pytest

from jobs import duplicates
from jobs.duplicates import Duplicates, Seen
from jobs.tables import MEASURED_RESPONSES

COLUMNS = ("record_index", "response_id", "path", "position")
SCHEMA = pa.schema([MEASURED_RESPONSES.field(name) for name in COLUMNS])


def table(*rows):
    return pa.Table.from_pylist([dict(zip(COLUMNS, row, strict=True)) for row in rows], SCHEMA)


def random_units(seed, n_units=40, n_ids=300):
    luck = random.Random(seed)
    for unit in range(n_units):
        rows = []
        for record in luck.sample(range(1000), luck.randrange(30)):
            name = None if luck.random() < 0.1 else f"r{luck.randrange(n_ids)}"
            position = None if luck.random() < 0.1 else luck.randrange(10**12)
            rows.append((record, name, f"logs/{unit // 3}.jsonl", position))
        yield rows


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("n_buckets", [1, 7, 64])
def test_all_but_the_first_of_each_id_are_found_with_the_place_of_that_first(monkeypatch, seed, n_buckets):
    monkeypatch.setattr(duplicates, "_N_BUCKETS", n_buckets)
    units = list(random_units(seed))
    first, expected = {}, {}
    for number, rows in enumerate(units):
        for record, name, *_ in rows:
            if name is not None and first.setdefault(name, (number, record)) != (number, record):
                known = next(row for row in units[first[name][0]] if row[0] == first[name][1])
                expected.setdefault(number, {})[record] = known[2:]
    with Seen() as seen:
        for number, rows in enumerate(units):
            seen.add(number, table(*rows))
        found = seen.find()
    assert found.units == sorted(expected)
    assert [found.of(number) for number in range(40)] == [expected.get(number, {}) for number in range(40)]
    assert len(found) == sum(map(len, expected.values())) > 100


def test_an_id_that_comes_again_in_the_same_unit_is_one_too():
    with Seen() as seen:
        seen.add(0, table((5, "a", "l", 1), (2, "b", "l", 2), (9, "a", "l", 3), (1, "a", "m", None)))
        assert seen.find().of(0) == {9: ("l", 1), 1: ("l", 1)}


def test_no_response_at_all_is_no_duplicate():
    with Seen() as seen:
        seen.add(0, table())
        seen.add(1, table((0, None, "l", 1), (1, None, "l", 2)))
        found = seen.find()
    assert (len(found), found.units, found.of(1)) == (0, [], {})
    assert Duplicates.none().of(7) == {}


def test_what_was_remembered_on_disk_is_gone_afterwards(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(KeyError), Seen() as seen:
        seen.add(0, table(*((i, f"r{i}", "l", i) for i in range(500))))
        assert list(tmp_path.iterdir())
        raise KeyError
    assert not list(tmp_path.iterdir())
