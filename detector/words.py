"""What the words of an answer say beside the model: do they stand in the passages, alone and in a row?

Copied text is grounded and text without a word in common mostly is not. That is all a word can tell; it costs
nothing, needs no model, and catches a changed number that every likelihood lets pass.
"""

from collections.abc import Sequence

import numpy as np

from detector.baselines import words
from detector.trace import F32, I32

COLUMNS = ("absent", "absent_2", "absent_3", "absent_4", "in_question", "digit", "capital")
"""Per token, 0 or 1: its word stands in no passage; no run of 2, 3, 4 words around it does; it stands in the
question; it holds a digit; it starts with a capital letter."""

_LONGEST_RUN = 4


def word_features(answer: str, offsets: I32, passages: Sequence[str], question: str) -> F32:
    """(A, 7) in the order of COLUMNS. A token belongs to the word of its first character that is in one.

    White space, punctuation and emoji claim nothing that could be missing: all zeros.
    """
    found = list(words(answer))
    keys = [key for _, _, key in found]
    texts = [[key for _, _, key in words(passage)] for passage in passages]
    asked = {key for _, _, key in words(question)}
    columns = np.zeros((len(found) + 1, len(COLUMNS)), dtype=np.float32)  # the last row is "no word"
    for length in range(1, _LONGEST_RUN + 1):
        known = {tuple(text[i : i + length]) for text in texts for i in range(len(text) - length + 1)}
        present = np.zeros(len(found), dtype=bool)
        for i in range(len(found) - length + 1):
            if tuple(keys[i : i + length]) in known:
                present[i : i + length] = True
        columns[:-1, length - 1] = ~present
    for i, (start, end, key) in enumerate(found):
        columns[i, 4:] = key in asked, any(c.isdigit() for c in answer[start:end]), answer[start].isupper()
    word_of = np.full(len(answer) + 1, len(found), dtype=np.int64)
    for i, (start, end, _) in enumerate(found):
        word_of[start:end] = i
    rows = [
        next((word_of[c] for c in range(start, end) if word_of[c] < len(found)), len(found))
        for start, end in offsets.tolist()
    ]
    return columns[rows]
