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
    n_header_tokens: int = 0
    """The last of the prompt tokens that count as answer where attention is read (see Layout)."""
    top_logprob: F32 | None = None
    """(2, A) log-probability of the most likely token, with all passages and with none, <= 0."""
    bottom_logprob: F32 | None = None
    """(2, A) log-probability of the least likely token, in the same two conditions."""
    rank: I32 | None = None
    """(2, A) how many tokens were more likely than the realised one, in the same two conditions."""
    attention_passages: F32 | None = None
    """(L, H, A + 1) share of attention on the passages, in [0, 1]. Row i predicts token i; row i + 1 is that
    token's own row."""
    attention_answer: F32 | None = None
    """(L, H, A + 1) share of attention on the answer's header and the answer so far, in [0, 1]."""
    attention_pieces: F32 | None = None
    """(K, A + 1) share of attention on each piece, mean over layers and heads, in [0, 1]; rows as above."""
    layers: tuple[int, ...] = ()
    """The S layers whose states were kept: l = output of block l, L + 1 = after the final norm."""
    states: F32 | None = None
    """(S, 2, A + 1, D) hidden states with all passages and with none; rows as in `attention_passages`."""
    carried: F32 | None = None
    """(S, A, D) attention-weighted sum of earlier tokens' state changes (CORTEX), on the tokens' own rows."""
    mmd_foil: F32 | None = None
    """(A,) LUMINA's external term: divergence from the answer read with foreign passages, in [0, 1]."""
    words: F32 | None = None
    """(A, 7) what the tokens' words say beside the model (`words.COLUMNS`), 0 or 1."""
    skipped: tuple[int, ...] = ()
    """Pieces that no pass left out (`Keep.least_share`): in `logprob_without` and `jsd_without` they stand as
    without effect."""
    truncated: bool = False
    """True when the prompt profile cut context or answer (only `gasp-v1` and `gasp-v2` ever do)."""
