"""The trivial baselines that every figure is shown beside."""

import re
import unicodedata
from collections.abc import Iterator
from functools import cache

import numpy as np

from detector.trace import F32, Trace


def score_perplexity(trace: Trace) -> F32:
    """(A,) surprisal -log p(token | all passages) in nats, >= 0; its mean is the log of the perplexity."""
    return -trace.logprob


def score_length(trace: Trace) -> F32:
    """(A,) ones: summed over a span they are its length in tokens."""
    return np.ones(len(trace.token_ids), dtype=np.float32)


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
