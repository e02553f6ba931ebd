"""The worst answers, and for each the sentences and passages that fit on its card."""

import hashlib
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from jobs.findings import heaviest
from jobs.report.excerpt import Span, clip, cost_bytes, excerpt, label, share_room
from jobs.report.page import Card, Evidence, PassageView, Scale, SentenceRow, Stretch
from jobs.report.rows import read_rows
from jobs.report.wording import direction
from jobs.storage import Storage
from jobs.tables import DIMENSIONS, VERDICT

PAGE_BYTES = 850_000
"""What all cards together may weigh, up to 100 of them; beyond, each still gets `MIN_CARD_BYTES`."""

MIN_CARD_BYTES = 8_500
MAX_CARD_BYTES = 60_000
MIN_SENTENCES = 10
MAX_PASSAGES = 12
MAX_PASSAGE_CHARACTERS = 4_000

# What the page adds to the text: a card's frame, a sentence's line and link, a passage's head and fold.
_CARD_BYTES = 900
_SENTENCE_BYTES = 340
_PASSAGE_BYTES = 330

_MATCH = ("date", "n_sentences", "n_answer_tokens", "n_context_tokens")
"""Columns in which a finding agrees with the measurement it was judged from. A response id that was logged
twice has one finding and two measurements."""

_TEXT = ("question", "answer", "passages")

_FINDING = (
    *("response_id", "trace_id", *DIMENSIONS, *_MATCH),
    *("n_flagged", "score_max", "flagged", "n_windows", "truncated"),
)

_SENTENCE = (
    *("response_id", "sentence_index", "start", "end", "score", "flagged"),
    *("evidence_passage_index", "evidence_passage_id", "evidence_drop_nats", "evidence_text"),
)

Row = dict[str, Any]


def collect_cards(
    storage: Storage,
    out: str,
    n_cards: int,
    scale: Scale | None,
    methods: tuple[str, ...],
    trained: bool = False,
    store_text: str = "full",
) -> tuple[Card, ...]:
    """The `n_cards` worst answers of the run: flagged first, then by their highest sentence score.

    `methods` are the other ones, whose scores stand beside; `trained`: the head of a bundle decided, and says
    why. One pass over the small parts that list all answers; then only the parts of the chosen ones are
    opened, and their text is cut to the card as soon as it is read.
    """
    chosen = _choose(storage, out, n_cards)
    by_id = {row["response_id"]: row for row in chosen if row["response_id"] is not None}
    stems = {row["part"] for row in chosen}
    card_bytes = min(max(PAGE_BYTES // max(len(chosen), 1), MIN_CARD_BYTES), MAX_CARD_BYTES)
    n_lines = max(MIN_SENTENCES, card_bytes * 2 // 5 // _SENTENCE_BYTES)
    columns = [*_SENTENCE, *(f"score_{method}" for method in methods), *(VERDICT[1:] if trained else ())]
    sentences = _read_sentences(storage, out, stems, set(by_id), columns, n_lines)
    built: dict[str, Card] = {}
    columns = [*_TEXT, "response_id", *_MATCH]
    table = "measurements/responses"
    if store_text == "flagged":
        table, columns = "texts", [*columns, "withheld"]
    for _, part in read_rows(storage, out, table, columns, stems, set(by_id)):
        # One row at a time: a part of long records is large enough as Arrow.
        for index in range(part.num_rows):
            measured = part.slice(index, 1).to_pylist()[0]
            response_id = measured["response_id"]
            found = by_id[response_id]
            if response_id not in built and all(found[name] == measured[name] for name in _MATCH):
                rows = sentences.get(response_id, [])
                built[response_id] = _build(found, rows, measured, card_bytes, scale, methods)
    return tuple(
        built.get(row["response_id"])
        or _build(row, sentences.get(row["response_id"], []), {}, card_bytes, scale, methods)
        for row in chosen
    )


def anchor(response_id: str | None) -> str:
    """A short anchor that no response id can break out of."""
    return "r" + hashlib.sha256((response_id or "").encode()).hexdigest()[:10]


def _choose(storage: Storage, out: str, n_cards: int) -> list[Row]:
    best: pa.Table | None = None
    order = [("flagged", "descending"), ("score_max", "descending"), ("response_id", "ascending")]
    for stem, part in read_rows(storage, out, "findings/responses", _FINDING):
        part = part.append_column("part", pa.repeat(stem, part.num_rows))
        pool = part if best is None else pa.concat_tables([best, part])
        best = pool.sort_by(order).slice(0, n_cards)
    return [] if best is None else best.to_pylist()


def _read_sentences(
    storage: Storage, out: str, stems: set[str], ids: set[str], columns: list[str], limit: int
) -> dict[str, list[Row]]:
    """Per response its worst `limit` sentences, in the order of the answer."""
    kept: dict[str, list[Row]] = {}
    for _, part in read_rows(storage, out, "findings/sentences", columns, stems, ids):
        for response_id in part["response_id"].unique().to_pylist():
            rows = part.filter(pc.equal(part["response_id"], response_id)).to_pylist()
            worst = sorted(rows, key=_badness)[:limit]
            kept[response_id] = sorted(worst, key=lambda row: row["sentence_index"])
    return kept


def _badness(row: Row) -> tuple[bool, float, int]:
    return not row["flagged"], -row["score"], row["sentence_index"]


def _build(
    found: Row,
    sentences: list[Row],
    measured: Row,
    card_bytes: int,
    scale: Scale | None,
    methods: tuple[str, ...],
) -> Card:
    """One card from a finding, its shown sentences and its text ({} where there is none)."""
    answer, passages = measured.get("answer"), measured.get("passages") or []
    left = card_bytes - _CARD_BYTES - _SENTENCE_BYTES * len(sentences)
    question, question_hidden = clip(measured.get("question") or "", left // 6)
    left -= cost_bytes(question)
    shades = {row["sentence_index"]: scale.level(row["score"]) if scale else 0 for row in sentences}
    stretches: tuple[Stretch, ...] = ()
    if answer is not None:
        stretches = _lay_out(answer, sentences, found["n_sentences"], left * 2 // 5, shades)
        left -= sum(cost_bytes(stretch.text) for stretch in stretches)
    views = _view(passages, sentences, left)
    shown = {view.number for view in views}
    language = found["language"]
    return Card(
        anchor=anchor(found["response_id"]),
        response_id=label(found["response_id"]),
        trace_id=label(found["trace_id"]),
        date=found["date"],
        dimensions=tuple((name, label(found[name])) for name in DIMENSIONS),
        language=language,
        direction=direction(language),
        question=question if measured.get("question") is not None else None,
        question_hidden=question_hidden,
        has_text=answer is not None,
        flagged=found["flagged"],
        n_sentences=found["n_sentences"],
        n_flagged=found["n_flagged"],
        score_max=found["score_max"],
        n_windows=found["n_windows"],
        truncated=found["truncated"],
        stretches=stretches,
        rows=tuple(_row(row, shades[row["sentence_index"]], shown, methods) for row in sentences),
        passages=views,
        n_passages_hidden=len(passages) - len(views),
        withheld=measured.get("withheld"),
    )


def _row(row: Row, level: int, shown: set[int], methods: tuple[str, ...]) -> SentenceRow:
    index = row["evidence_passage_index"]
    evidence = None
    if index is not None:
        evidence = Evidence(
            passage=index + 1,
            passage_id=label(row["evidence_passage_id"]),
            drop_nats=row["evidence_drop_nats"],
            shown=index + 1 in shown,
        )
    groups = {name.removeprefix("ensemble_"): row[name] for name in VERDICT[1:] if name in row}
    reason = heaviest(groups, row["flagged"]) if groups else None
    return SentenceRow(
        number=row["sentence_index"] + 1,
        start=row["start"],
        end=row["end"],
        score=row["score"],
        level=level,
        flagged=row["flagged"],
        evidence=evidence,
        scores=tuple(row[f"score_{method}"] for method in methods),
        reason=reason,
        weight=groups[reason] if reason else None,
    )


def _lay_out(
    answer: str, sentences: list[Row], n_sentences: int, room_bytes: int, shades: dict[int, int]
) -> tuple[Stretch, ...]:
    """The answer as stretches that, with what they count as hidden, add up to all of it."""
    texts = [answer[row["start"] : row["end"]] for row in sentences]
    grants = share_room([cost_bytes(text) for text in texts], room_bytes)
    stretches: list[Stretch] = []
    position, expected = 0, 0
    for row, text, grant in zip(sentences, texts, grants, strict=True):
        index = row["sentence_index"]
        stretches += _between(answer[position : row["start"]], index - expected)
        kept, n_hidden = clip(text, grant)
        stretches.append(Stretch(kept, index + 1, shades[index], row["flagged"], n_hidden))
        position, expected = row["end"], index + 1
    stretches += _between(answer[position:], n_sentences - expected)
    return tuple(stretches)


def _between(text: str, n_sentences: int) -> list[Stretch]:
    if n_sentences:
        return [Stretch("", n_hidden=len(text), n_hidden_sentences=n_sentences)]
    if not text:
        return []
    kept, n_hidden = clip(text, 200)  # white space between sentences; a log may hold a page of it
    return [Stretch(kept, n_hidden=n_hidden)]


def _view(passages: list[Row], sentences: list[Row], room_bytes: int) -> tuple[PassageView, ...]:
    """The passages that shown sentences rest on, then the first of the others, in their logged order."""
    pieces: dict[int, list[tuple[int, Span]]] = {}
    # Where not all of it fits, the page shows what mattered most.
    for row in sorted(sentences, key=lambda row: -(row["evidence_drop_nats"] or 0.0)):
        index = row["evidence_passage_index"]
        if index is not None and index < len(passages):
            pieces.setdefault(index, []).append(
                (row["sentence_index"] + 1, _find_piece(passages[index], row))
            )
    others = [index for index in range(len(passages)) if index not in pieces]
    # A passage of which less than its own frame could be shown is better named than shown.
    n_kept = min(max(room_bytes // (2 * _PASSAGE_BYTES), 1), MAX_PASSAGES)
    kept = sorted([*pieces, *others][:n_kept])
    texts = [passages[index]["text"] or "" for index in kept]
    grants = share_room([cost_bytes(text) for text in texts], room_bytes - _PASSAGE_BYTES * len(kept))
    views = []
    for index, text, grant in zip(kept, texts, grants, strict=True):
        resting = pieces.get(index, [])
        views.append(
            PassageView(
                number=index + 1,
                id=label(passages[index]["id"]),
                source=label(passages[index]["source"]),
                score=passages[index]["score"],
                n_characters=len(text),
                sentences=tuple(sorted(number for number, _ in resting)),
                whole=bool(resting) and all(span == (0, len(text)) for _, span in resting),
                excerpt=excerpt(text, resting, grant, MAX_PASSAGE_CHARACTERS),
            )
        )
    return tuple(views)


def _find_piece(passage: Row, row: Row) -> Span:
    # Findings hold the text of the piece and not its place. Where a passage repeats it word for word, the
    # first is marked: they say the same.
    text, piece = passage["text"] or "", row["evidence_text"]
    start = text.find(piece) if piece else -1
    return (start, start + len(piece)) if start >= 0 else (0, len(text))
