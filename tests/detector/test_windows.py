import pytest
from hypothesis import given
from hypothesis import strategies as st

from detector.errors import RecordRejected
from detector.windows import cut_segments, group_pieces


@given(st.lists(st.integers(1, 50), min_size=1, max_size=20), st.integers(50, 120))
def test_every_piece_is_in_a_window_and_no_window_is_too_large(lengths, room):
    windows = group_pieces(lengths, room)
    assert sorted({i for window in windows for i in window}) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in window) <= room for window in windows)
    assert all(window == tuple(range(window[0], window[-1] + 1)) for window in windows)


def test_what_fits_is_one_window():
    assert group_pieces([10, 20, 30], 60) == [(0, 1, 2)]


@given(st.integers(1, 5000), st.integers(64, 2000))
def test_every_answer_token_is_scored_once_within_its_half_of_the_window(n_answer, room):
    segments, left = cut_segments(n_answer, room)
    scored = [token for segment in segments for token in range(segment.start, segment.stop)]
    assert scored == list(range(n_answer))
    assert all(segment.stop - segment.tail + left <= room for segment in segments)
    assert all(segment.tail < segment.start for segment in segments[1:])


def test_a_question_that_fills_the_window_is_rejected():
    with pytest.raises(RecordRejected, match="over_window"):
        cut_segments(5, 40)
