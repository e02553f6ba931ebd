"""Sentences of an answer, as spans of code points.

The `sentencex` package (MIT, offline, exact code-point offsets) does the work; it stays behind
`split_sentences` so that it can be replaced. Answers are chat text, so list items, headings, table rows and
fenced code are cut apart first: left to itself a sentence splitter returns a whole numbered list as one.
"""

import re
import unicodedata
from collections import Counter
from collections.abc import Iterator

import sentencex

Span = tuple[int, int]

_FENCE = re.compile(r"^[ \t]*(```|~~~)")
_BLOCK_START = re.compile(r"^[ \t]*(?:[-*+•–][ \t]+|\(?\d{1,3}[.)][ \t]+)")
_WHOLE_LINE = re.compile(r"^[ \t]*(?:\||#{1,6}[ \t])")  # a table row or a heading
_MARKER_ONLY = re.compile(r"^[ \t]*(?:[-*+•–]|\(?\d{1,3}[.)]|#{1,6})[ \t]*$")
_WORD = re.compile(r"\w")

# Script prefix of a character's Unicode name -> languages written in it, the default first.
_SCRIPTS: dict[str, tuple[str, ...]] = {
    "HIRAGANA": ("ja",),
    "KATAKANA": ("ja",),
    "CJK": ("zh", "ja", "ko"),
    "HANGUL": ("ko",),
    "ARABIC": ("ar", "fa", "ur"),
    "DEVANAGARI": ("hi", "mr", "ne"),
    "CYRILLIC": ("ru", "uk", "bg", "sr"),
    "THAI": ("th",),
    "HEBREW": ("he",),
    "GREEK": ("el",),
    "ARMENIAN": ("hy",),
    "BENGALI": ("bn",),
    "TAMIL": ("ta",),
    "TELUGU": ("te",),
}


def detect_language(text: str, language: str | None = None) -> str:
    """Two-letter code whose sentence rules fit `text`.

    The record's `language` wins unless the script contradicts it (a Chinese answer logged as "en" would
    never be split). Any kana at all means Japanese, since Japanese text is mostly Han characters by count.
    """
    logged = (language or "").replace("_", "-").split("-")[0].lower()
    counts: Counter[str] = Counter()
    for character in text[:2000]:
        if character.isalpha():
            name = unicodedata.name(character, "")
            counts[next((script for script in _SCRIPTS if name.startswith(script)), "LATIN")] += 1
    if counts["HIRAGANA"] or counts["KATAKANA"]:
        script = "HIRAGANA" if counts["LATIN"] < counts.total() / 2 else "LATIN"
    else:
        script = counts.most_common(1)[0][0] if counts else "LATIN"
    if script == "LATIN":
        known_elsewhere = any(logged in languages for languages in _SCRIPTS.values())
        return logged if len(logged) == 2 and not known_elsewhere else "en"
    return logged if logged in _SCRIPTS[script] else _SCRIPTS[script][0]


def split_sentences(text: str, language: str | None = None) -> list[Span]:
    """Sentence spans of `text` in order, without the white space around them.

    Every character that is not white space belongs to exactly one span. A list marker or other fragment
    without a single word character joins the sentence that follows it (the last one, at the end of the text).

    >>> split_sentences("Dr. Ada wrote it. See below:\\n1. Yes.\\n2. No.")
    [(0, 17), (18, 28), (29, 36), (37, 43)]
    """
    code = detect_language(text, language)
    spans: list[Span] = []
    pending: int | None = None  # start of fragments that wait for a sentence to join
    for block_start, block_end, whole in _blocks(text):
        block = text[block_start:block_end]
        cuts = [(0, len(block))] if whole else _boundaries(code, block)
        for cut_start, cut_end in cuts:
            span = _strip(text, block_start + cut_start, block_start + cut_end)
            if span is None:
                continue
            start, end = span
            piece = text[start:end]
            if not _WORD.search(piece) or _MARKER_ONLY.match(piece):
                pending = start if pending is None else pending
                continue
            spans.append((start if pending is None else pending, end))
            pending = None
    if pending is not None:
        rest = _strip(text, pending, len(text))
        assert rest is not None  # pending points at a character that is not white space
        if spans:
            rest = (spans.pop()[0], rest[1])
        spans.append(rest)
    return spans


def group_sentences(text: str, groups: int, language: str | None = None) -> list[Span]:
    """Cut `text` into at most `groups` spans of whole sentences, as equal in length as sentences allow.

    Used where a log keeps its context as one text: the groups are what leave-one-out removes. As in GASP
    (section 3.2) a text of fewer sentences gives fewer groups. Spans are stripped of white space.
    """
    sentences = split_sentences(text, language)
    if len(sentences) <= groups:
        return sentences
    total = sum(end - start for start, end in sentences)
    spans: list[Span] = []
    first, used = 0, 0
    for index, (start, end) in enumerate(sentences):
        used += end - start
        left = len(sentences) - index - 1
        wanted = groups - len(spans) - 1
        if wanted and (used >= total * (len(spans) + 1) / groups or left == wanted):
            spans.append((sentences[first][0], end))
            first = index + 1
    spans.append((sentences[first][0], sentences[-1][1]))
    return spans


def _boundaries(code: str, block: str) -> list[Span]:
    cuts = sentencex.get_sentence_boundaries(code, encodable(block))
    return [(cut["start_index"], cut["end_index"]) for cut in cuts]


def encodable(text: str) -> str:
    """`text` with each lone surrogate (half an emoji in a broken log) replaced, so that offsets stay."""
    return text if text.isascii() else "".join("\ufffd" if "\ud800" <= c <= "\udfff" else c for c in text)


def _blocks(text: str) -> Iterator[tuple[int, int, bool]]:
    """Cut before list items and blank lines; headings, table rows and fenced code stay whole (True)."""
    start = position = 0
    fenced = False
    for line in text.splitlines(keepends=True):
        fence = _FENCE.match(line) is not None
        whole = not fenced and _WHOLE_LINE.match(line) is not None
        opens = fence or whole or _BLOCK_START.match(line) is not None or not line.strip()
        if opens and not fenced and position > start:
            yield start, position, False
            start = position
        position += len(line)
        if whole or (fence and fenced):
            yield start, position, True
            start = position
        if fence:
            fenced = not fenced
    if position > start:
        yield start, position, fenced


def _strip(text: str, start: int, end: int) -> Span | None:
    while start < end and text[start].isspace():
        start += 1
    while end > start and text[end - 1].isspace():
        end -= 1
    return (start, end) if start < end else None
