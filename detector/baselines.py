"""The trivial baselines that every figure is shown beside."""

import re
import unicodedata
from collections.abc import Iterator, Sequence
from functools import cache

import numpy as np
from numpy.typing import NDArray

from detector.trace import F32, I32, Trace


def score_perplexity(trace: Trace) -> F32:
    """(A,) surprisal -log p(token | all passages) in nats, >= 0; its mean is the log of the perplexity."""
    return -trace.logprob


def score_length(trace: Trace) -> F32:
    """(A,) ones: summed over a span they are its length in tokens."""
    return np.ones(len(trace.token_ids), dtype=np.float32)


def word_overlap(answer: str, offsets: I32, passages: Sequence[str]) -> NDArray[np.bool_]:
    """(A,) True where every word that the token touches stands in some passage.

    Words are compared by `words`. A token that touches none (white space, punctuation, emoji) is True: it
    claims nothing that could be missing.
    """
    known = {key for passage in passages for _, _, key in words(passage)}
    absent = np.zeros(len(answer) + 1, dtype=np.int64)  # before each character: absent ones so far
    for start, end, key in words(answer):
        absent[start + 1 : end + 1] = key not in known
    absent = np.cumsum(absent)
    return np.asarray(absent[offsets[:, 1]] == absent[offsets[:, 0]])


def score_overlap(overlap: NDArray[np.bool_]) -> F32:
    """(A,) 1 where the token's word is in no passage, else 0. Higher = less grounded.

    Nothing in between: how rare or how near a word is would be another method, and a baseline must be one
    that anybody would write.
    """
    return (~overlap).astype(np.float32)


def absent_words(
    answer: str, sentences: Sequence[tuple[int, int]], passages: Sequence[str]
) -> NDArray[np.float64]:
    """(n,) share of each sentence's words that are in no passage, in [0, 1]; 0 for one without words.

    `sentences` are code points start:end. A word belongs to the sentence it starts in, and counts as often
    as it stands there: the mean of `score_overlap` would count it once per token and punctuation with it.
    """
    known = {key for passage in passages for _, _, key in words(passage)}
    found = [(start, key not in known) for start, _, key in words(answer)]
    shares = [[absent for at, absent in found if start <= at < end] for start, end in sentences]
    return np.array([np.mean(share) if share else 0.0 for share in shares])


def words(text: str) -> Iterator[tuple[int, int, str]]:
    """Start, end (code points) and key of each word of `text`; words with equal keys are the same word.

    A word is a run of letters, digits and their combining marks. Where a script writes no spaces (Han, kana,
    Thai, Lao, Khmer, Burmese) it is one character, for want of a dictionary. A number is one word with
    the separators inside it, so 3.5 is neither 3 nor 5 and 1,891 is not 1891: exact, since a changed digit is
    what must be noticed. Keys ignore case and composition (NFKC, casefold).
    """
    for match in _pattern().finditer(text):
        start, end = match.span()
        yield start, end, unicodedata.normalize("NFKC", match.group()).casefold()


@cache
def _pattern() -> re.Pattern[str]:
    """Built at first use: `re` knows no combining marks and counts them as no part of a word."""
    code_points = (*range(0x300, 0x20000), *range(0xE0100, 0xE01F0))
    marks = (
        "[" + "".join(re.escape(chr(c)) for c in code_points if unicodedata.category(chr(c))[0] == "M") + "]*"
    )
    unspaced = "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3005-\u3007\u3040-\u30ff\u31f0-\u31ff"
    unspaced += "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\uff66-\uff9f\U00020000-\U0003ffff]"
    letter, single = rf"(?:\d|(?!{unspaced})[^\W_]){marks}", rf"(?={unspaced})[^\W_]{marks}"
    return re.compile(rf"(?:{letter}|(?<=\d)[.,:](?=\d))+|{single}")
