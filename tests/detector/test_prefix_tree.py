import pytest
from hypothesis import given
from hypothesis import strategies as st

from detector.prefix_tree import build_tree

sequences = st.lists(st.lists(st.integers(0, 2), max_size=7).map(tuple), min_size=1, max_size=6)


@given(sequences)
def test_every_sequence_can_be_read_back_along_its_path(given_sequences):
    tree = build_tree(given_sequences)
    for index, sequence in enumerate(given_sequences):
        path = [node for node in tree.walk() if index in node.sequences]
        assert tuple(token for node in path for token in node.tokens) == sequence
        assert [node.start for node in path[1:]] == [node.stop for node in path[:-1]]


@given(sequences)
def test_cost_is_the_number_of_distinct_prefixes(given_sequences):
    prefixes = {sequence[:n] for sequence in given_sequences for n in range(1, len(sequence) + 1)}
    assert build_tree(given_sequences).n_tokens == len(prefixes)


def test_leave_one_out_costs_what_the_plan_says():
    # P = 3 prompt tokens, three passages of 4, S + A = 5: K + 2 = 5 conditions (performance.md, "exact").
    head, passages, tail = (0, 1, 2), [(10,) * 4, (11,) * 4, (12,) * 4], (90, 91, 92, 93, 94)

    def prompt(*kept):
        return head + tuple(t for k in kept for t in passages[k]) + tail

    conditions = [prompt(0, 1, 2), prompt(), prompt(1, 2), prompt(0, 2), prompt(0, 1)]
    assert build_tree(conditions).n_tokens == 5 * 5 + 3 + 12 + 12 * (3 - 1) // 2


def test_no_sequence_is_an_error():
    with pytest.raises(ValueError, match="at least one"):
        build_tree([])
