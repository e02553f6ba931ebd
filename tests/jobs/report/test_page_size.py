"""The page stays small, whatever the logs hold, and counts what it leaves out."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.report import collect, render
from jobs.report.excerpt import clip, cost_bytes, excerpt, share_room
from jobs.storage import Storage
from tests.jobs.report.fake_run import Answer, Said, write_fake_run
from tests.jobs.report.reader import PROSE, Reader

HOSTILE = "\"><script>alert(1)</script><img src=x onerror=alert(2)>{{ 7 * 7 }}</style>'&amp;"


def long_answer(index: int) -> Answer:
    passages = [{"id": f"doc-{k}", "text": PROSE * 25} for k in range(8)]
    said = [Said(f"{k}: {PROSE}".strip(), (k * 7919 + index) % 100 / 20 - 2, k % 8) for k in range(24)]
    return Answer(said, passages, PROSE * 20, f"r{index:04d}")


@pytest.mark.parametrize("n", [100, 500])
def test_page_of_long_answers_stays_small(tmp_path: Path, n: int) -> None:
    config = write_fake_run(
        str(tmp_path), [long_answer(i) for i in range(n)], settings={"report": {"cards": 500}}
    )
    html = render(collect(str(tmp_path), Storage(), config))
    assert html.count("<article") == n
    assert len(html.encode()) < n * 10_000


@pytest.mark.parametrize("text", ["<&>\"'" * 40_000, "\u202e" * 60_000, "ก" * 100_000, "\n" * 300_000])
def test_text_that_grows_when_escaped_stays_small(tmp_path: Path, text: str) -> None:
    answer = Answer([Said(text, 3.0, 0, after=text)], [text], text, text[:5_000], dimensions={"app": text})
    config = write_fake_run(str(tmp_path), [answer])
    assert len(render(collect(str(tmp_path), Storage(), config)).encode()) < 110_000


def test_what_does_not_fit_is_counted(tmp_path: Path) -> None:
    answers = [long_answer(i) for i in range(100)]
    config = write_fake_run(str(tmp_path), answers)
    card = collect(str(tmp_path), Storage(), config).cards[0]
    answer = "".join(said.text + said.after for said in answers[0].said)
    assert sum(len(stretch.text) + stretch.n_hidden for stretch in card.stretches) == len(answer)
    n_shown = sum(stretch.number is not None for stretch in card.stretches)
    assert n_shown + sum(stretch.n_hidden_sentences for stretch in card.stretches) == 24
    assert len(card.passages) + card.n_passages_hidden == 8
    for view in card.passages:
        cut = view.excerpt
        shown = sum(
            len(run.text) for runs in (cut.folded_before, cut.visible, cut.folded_after) for run in runs
        )
        assert cut.n_before + shown + cut.n_after == view.n_characters == len(PROSE * 25)
    words = Reader(render(collect(str(tmp_path), Storage(), config))).words
    assert f"{24 - n_shown} sentences with lower scores are not on this page" in words
    assert "characters not on this page" in words


def test_worst_sentences_are_the_ones_kept(tmp_path: Path) -> None:
    config = write_fake_run(str(tmp_path), [long_answer(i) for i in range(100)])
    for card in collect(str(tmp_path), Storage(), config).cards[:3]:
        kept = {row.score for row in card.rows}
        everything = sorted(
            (said.score for said in long_answer(int(card.response_id[1:])).said), reverse=True
        )
        assert min(kept) >= everything[len(card.rows) - 1]


def test_evidence_deep_in_a_long_passage_is_in_sight(tmp_path: Path) -> None:
    passage = PROSE * 200 + "The warranty lasts two years. " + PROSE * 200
    said = [Said("Two years.", -1.0, 0, piece="The warranty lasts two years. ")]
    config = write_fake_run(str(tmp_path), [Answer(said, [passage])])
    (view,) = collect(str(tmp_path), Storage(), config).cards[0].passages
    assert [run.text for run in view.excerpt.visible if run.sentences] == ["The warranty lasts two years. "]
    assert view.excerpt.n_before > 10_000 and view.excerpt.n_after > 10_000


def test_piece_that_matters_most_is_the_one_in_sight(tmp_path: Path) -> None:
    pieces = ["The warranty lasts two years. ", "The receipt is needed. "]
    passage = pieces[0] + PROSE * 40 + pieces[1]
    said = [
        Said("Two years.", 1.0, 0, drop=0.1, piece=pieces[0]),
        Said("With receipt.", -1.0, 0, drop=0.9, piece=pieces[1]),
    ]
    config = write_fake_run(str(tmp_path), [Answer(said, [passage])])
    (view,) = collect(str(tmp_path), Storage(), config).cards[0].passages
    assert [run.text for run in view.excerpt.visible if run.sentences] == [pieces[1]]
    assert [run.text for run in view.excerpt.folded_before if run.sentences] == [pieces[0]]


@given(
    text=st.text(max_size=3_000),
    spans=st.lists(st.tuples(st.integers(0, 3_000), st.integers(0, 3_000)), max_size=4),
    room=st.integers(0, 4_000),
)
def test_excerpt_and_what_it_leaves_out_add_up_to_the_text(
    text: str, spans: list[tuple[int, int]], room: int
) -> None:
    pieces = [(n + 1, (min(*s, len(text)), min(max(s), len(text)))) for n, s in enumerate(spans)]
    cut = excerpt(text, pieces, room, 1_000)
    runs = [*cut.folded_before, *cut.visible, *cut.folded_after]
    shown = "".join(run.text for run in runs)
    assert text[cut.n_before : len(text) - cut.n_after] == shown
    assert len(shown) <= 1_000
    position = cut.n_before
    for run in runs:
        inside = [n for n, (a, b) in pieces if a <= position and position + len(run.text) <= b]
        assert list(run.sentences) == inside
        position += len(run.text)


@given(costs=st.lists(st.integers(0, 500), max_size=12), room=st.integers(-100, 2_000))
def test_room_is_dealt_out_and_not_exceeded(costs: list[int], room: int) -> None:
    granted = share_room(costs, room)
    assert all(0 <= grant <= cost for grant, cost in zip(granted, costs, strict=True))
    assert sum(granted) <= max(room, 0)
    if sum(costs) <= room:
        assert granted == costs


@given(text=st.text(max_size=400), room=st.integers(0, 500))
def test_clip_counts_what_it_cuts(text: str, room: int) -> None:
    kept, n_hidden = clip(text, room)
    assert text.startswith(kept) and len(kept) + n_hidden == len(text)
    if n_hidden == 0:
        assert cost_bytes(text) <= room
