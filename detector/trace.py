"""Trace: what one reading of an answer under all its conditions left behind."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
I32 = NDArray[np.int32]
I64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Piece:
    """What one leave-one-out condition removes: code points `start:end` of passage `passage_index`.

    Normally a whole passage. A group of sentences where the log kept no passage boundaries, a chunk where
    a passage alone is longer than the scorer's window.
    """

    passage_index: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Trace:
    """One window of one record: A answer tokens read under K + 2 conditions (full, none, K without one).

    All log-probabilities and divergences are in nats. A field that the run did not ask for is None; there
    is no NaN. Optional fields are listed in the `needs` of the methods that read them.
    """

    token_ids: I64
    """(A,) answer tokens, the same in every condition."""
    offsets: I32
    """(A, 2) code points into the answer, end exclusive. Byte-level tokens of one character share a pair."""
    pieces: tuple[Piece, ...]
    """The K pieces that are removed one at a time, in order of appearance."""
    logprob: F32
    """(A,) log p(token | passages, question, answer so far), <= 0."""
    entropy: F32
    """(A,) entropy of the next-token distribution with all passages, in [0, ln V]."""
    logprob_no_context: F32
    """(A,) the same log-probability without any passage, <= 0."""
    entropy_no_context: F32
    """(A,) entropy without any passage, in [0, ln V]."""
    jsd_no_context: F32
    """(A,) Jensen-Shannon divergence between the two distributions, in [0, ln 2]."""
    logprob_without: F32 | None
    """(K, A) log-probability with piece k removed, <= 0."""
    jsd_without: F32 | None
    """(K, A) Jensen-Shannon divergence between all passages and all but piece k, in [0, ln 2]."""
    n_context_tokens: int
    """Passage tokens in the full condition."""
    n_prompt_tokens: int
    """All tokens before the answer in the full condition."""
    n_computed_tokens: int
    """Tokens that went through the model for this trace."""
    truncated: bool = False
    """True when the prompt profile cut context or answer (only `gasp-v1` and `gasp-v2` ever do)."""
