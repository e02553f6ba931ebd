import pytest
from hypothesis import given
from hypothesis import strategies as st

from detector.prefix_tree import build_tree, hide

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


hiding = st.lists(
    st.tuples(
        st.lists(st.integers(0, 2), min_size=3, max_size=6).map(tuple),
        st.lists(st.integers(0, 2), max_size=4).map(tuple),
        st.sampled_from([(0, 0), (0, 1), (1, 3), (2, 3)]),
    ),
    min_size=1,
    max_size=6,
)


@given(hiding)
def test_a_node_hides_one_span_and_a_path_gives_back_every_token_with_its_span(given_sequences):
    tree = build_tree([read + hide(rest, *span) for read, rest, span in given_sequences])
    for index, (read, rest, span) in enumerate(given_sequences):
        path = [node for node in tree.walk() if index in node.sequences]
        found = [(token, node.hidden) for node in path for token in node.tokens]
        hidden = span if span[0] < span[1] else None
        assert found == [(token, None) for token in read] + [(token, hidden) for token in rest]


@given(hiding)
def test_tokens_that_hide_different_spans_are_computed_apart(given_sequences):
    prefixes = set()
    for read, rest, span in given_sequences:
        hidden = span if span[0] < span[1] else None
        pairs = [(token, None) for token in read] + [(token, hidden) for token in rest]
        prefixes |= {tuple(pairs[:n]) for n in range(1, len(pairs) + 1)}
    tree = build_tree([read + hide(rest, *span) for read, rest, span in given_sequences])
    assert tree.n_tokens == len(prefixes)


def test_large_token_ids_survive_hiding():
    tree = build_tree([(7, 8, *hide((2**32 - 1, 0), 1, 2))])
    assert [(node.tokens, node.hidden) for node in tree.walk()] == [((7, 8), None), ((2**32 - 1, 0), (1, 2))]


@pytest.mark.parametrize("span", [(0, 3), (2, 3), (5, 9)])
def test_what_comes_later_cannot_be_hidden(span):
    with pytest.raises(ValueError, match="cannot be hidden from position 2"):
        build_tree([(7, 8, *hide((9, 9), *span))])
