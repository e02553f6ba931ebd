import dataclasses

import pytest

from detector import Passage, Record
from detector.errors import RejectReason
from jobs.tables import REASONS


def test_strings_become_passages():
    record = Record(question="q", passages=["a", Passage("b", id="7")], answer="x")
    assert record.passages == (Passage("a"), Passage("b", id="7"))


def test_one_string_is_not_a_list_of_letters():
    with pytest.raises(TypeError, match="wrap it in a list"):
        Record(question="q", passages="a passage", answer="x")


def test_an_undivided_record_has_one_passage():
    with pytest.raises(ValueError, match="whole context"):
        Record(question="q", passages=["a", "b"], answer="x", undivided=True)


def test_records_do_not_change():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Record(question="q", passages=[], answer="x").answer = "y"


def test_the_tables_count_every_reject_reason():
    assert REASONS == tuple(reason.value for reason in RejectReason)
