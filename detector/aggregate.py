"""Token numbers to sentence and response numbers.

Order matters and is the authors' (GASP, section 3): mean over the tokens of a span first, then the maximum
over the removed pieces. The whole per-piece vector is kept beside the maximum.
"""

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass

import numpy as np
from numpy.typing import NDArray

from detector import blend
from detector.bundle import Verdict, VerdictHead
from detector.errors import RecordRejected, RejectReason
from detector.prompts import Reading
from detector.sentences import Span
from detector.trace import F32, I32, Piece, Trace


@dataclass(frozen=True, slots=True)
class Features:
    """Means over the tokens of one span, in nats but for the two in [0, 1].

    `absent_pairs` is the share of its tokens of which no run of two words stands in a passage, and
    `attention_share` how much of the attention on passages and answer falls on the passages (`blend`); None
    where the passes kept no words, no attention.

    `drops[k]` and `jsds[k]` belong to the record's piece k; None where the piece was not in the window that
    the span was read in, where its pass was skipped, or with leave-one-out off. `max_drop` and `max_jsd` are
    their largest values.
    """

    gap: float
    jsd_none: float
    max_drop: float | None
    max_jsd: float | None
    surprisal: float
    entropy: float
    absent_pairs: float | None
    attention_share: float | None
    drops: tuple[float | None, ...]
    jsds: tuple[float | None, ...]


@dataclass(frozen=True, slots=True)
class SentenceMeasurement:
    """One sentence `start:end` of the answer (code points), read in its best of `n_windows` windows."""

    index: int
    start: int
    end: int
    n_tokens: int
    n_windows: int
    truncated: bool
    features: Features
    evidence: Piece | None
    """The piece whose removal costs the sentence most; None with leave-one-out off."""
    verdict: Verdict | None = None
    """What the head of a bundle says, in the window where it finds the sentence best grounded."""

    @property
    def log_tokens(self) -> float:
        """Natural logarithm of the length in tokens, the form in which `blend` adds it."""
        return math.log(self.n_tokens)


@dataclass(frozen=True, slots=True)
class Measurement:
    """What is stored about one answer: numbers without opinions."""

    sentences: tuple[SentenceMeasurement, ...]
    features: Features
    n_passages: int
    n_context_tokens: int
    n_answer_tokens: int
    n_computed_tokens: int
    n_windows: int
    truncated: bool
    ensemble: float | None = None
    """Probability that the answer holds unsupported text; None without a bundle or a sentence."""


def assign_tokens(
    answer: str, offsets: I32, sentences: Sequence[Span], *, raw: bool = False
) -> NDArray[np.int32]:
    """(A,) index of the sentence that each token belongs to, -1 for none.

    A token belongs to the sentence of its first character that is not white space, because byte-level
    tokens carry the space before a word. `raw` uses the start of the offset instead, as the GASP author's
    code does: the first token of every sentence but the first then counts for the sentence before.
    """
    owner = np.full(len(answer) + 1, -1, dtype=np.int32)
    for index, (start, end) in enumerate(sentences):
        owner[start:end] = index
    firsts = []
    for start, end in offsets.tolist():
        first = start
        while not raw and first < end and answer[first].isspace():
            first += 1
        firsts.append(first)
    return owner[np.asarray(firsts, dtype=np.int64)]


def sentence_tokens(reading: Reading, answer: str) -> dict[int, NDArray[np.intp]]:
    """Index of each sentence that is judged -> the indices of its tokens, at least one, ascending.

    `assign_tokens` says which they are. A sentence whose only characters share a token with the sentence
    before ("." + "\n1" in one token) gets that token as well; one with fewer tokens than the profile asks
    for is left out.
    """
    profile, offsets = reading.profile, np.asarray(reading.offsets, dtype=np.int32).reshape(-1, 2)
    owner = assign_tokens(answer, offsets, reading.sentences, raw=profile.raw_offsets)
    members = {}
    for index, (start, end) in enumerate(reading.sentences):
        tokens = np.flatnonzero(owner == index)
        if not len(tokens) and not profile.raw_offsets:
            tokens = np.flatnonzero((offsets[:, 0] < end) & (offsets[:, 1] > start))
        if len(tokens) >= profile.min_sentence_tokens:
            members[index] = tokens
    return members


def span_features(
    trace: Trace,
    tokens: NDArray[np.intp],
    piece_indices: Sequence[int],
    n_pieces: int,
    attention_share: F32 | None = None,
) -> Features:
    """Features over some answer tokens (indices, at least one) of one window.

    `piece_indices[k]` is the place of the window's piece k among the record's `n_pieces`. `attention_share`:
    (A,) of the whole trace (`blend`), which is the same for all of its spans; None where it was not kept.
    """

    def mean(values: NDArray[np.float32]) -> NDArray[np.float64]:
        return np.asarray(values[..., tokens].mean(axis=-1, dtype=np.float64))

    logprob = mean(trace.logprob)
    drops: list[float | None] = [None] * n_pieces
    jsds: list[float | None] = [None] * n_pieces
    if trace.logprob_without is not None and trace.jsd_without is not None:
        window_drops, window_jsds = logprob - mean(trace.logprob_without), mean(trace.jsd_without)
        for k, index in enumerate(piece_indices):
            if k in trace.skipped:
                continue
            drops[index], jsds[index] = float(window_drops[k]), float(window_jsds[k])
    return Features(
        gap=float(logprob - mean(trace.logprob_no_context)),
        jsd_none=float(mean(trace.jsd_no_context)),
        max_drop=max((d for d in drops if d is not None), default=None),
        max_jsd=max((j for j in jsds if j is not None), default=None),
        surprisal=float(-logprob),
        entropy=float(mean(trace.entropy)),
        absent_pairs=None if trace.words is None else float(mean(blend.absent_pairs(trace))),
        attention_share=None if attention_share is None else float(mean(attention_share)),
        drops=tuple(drops),
        jsds=tuple(jsds),
    )


def measure(
    reading: Reading,
    answer: str,
    traces: Sequence[Trace],
    n_passages: int,
    head: VerdictHead | None = None,
) -> Measurement:
    """Reduce the traces of a record's windows (one each, whole answer) to its sentences and the response.

    Read in several windows, a sentence takes the one with the largest gap: a passage that supports it is in
    one window and not in the others. The response does the same over all its tokens. What `head` says is
    taken where it is lowest, for the same reason. Raises RecordRejected where it says no probability.
    """
    n_pieces, n_tokens = len(reading.pieces), len(reading.answer_ids)
    shares = [None if t.attention_passages is None else blend.attention_share(t) for t in traces]

    def best(tokens: NDArray[np.intp]) -> Features:
        seen = [
            span_features(trace, tokens, window.piece_indices, n_pieces, share)
            for trace, window, share in zip(traces, reading.windows, shares, strict=True)
        ]
        return max(seen, key=lambda features: features.gap)

    members = sentence_tokens(reading, answer)
    verdicts: Sequence[Verdict | None] = [None] * len(members)
    answer_probability = None
    if head is not None and members:
        verdicts, answer_probability = lowest_verdicts(head, traces, tuple(members.values()))
    sentences = []
    for (index, tokens), verdict in zip(members.items(), verdicts, strict=True):
        start, end = reading.sentences[index]
        features = best(tokens)
        known = [k for k, drop in enumerate(features.drops) if drop is not None]
        top = max(known, key=lambda k: features.drops[k] or 0.0, default=None)
        sentences.append(
            SentenceMeasurement(
                index=index,
                start=start,
                end=end,
                n_tokens=len(tokens),
                n_windows=len(traces),
                truncated=reading.truncated,
                features=features,
                evidence=None if top is None else reading.pieces[top],
                verdict=verdict,
            )
        )
    return Measurement(
        sentences=tuple(sentences),
        features=best(np.arange(n_tokens)),
        n_passages=n_passages,
        n_context_tokens=reading.n_context_tokens,
        n_answer_tokens=n_tokens,
        n_computed_tokens=sum(trace.n_computed_tokens for trace in traces),
        n_windows=len(traces),
        truncated=reading.truncated,
        ensemble=answer_probability,
    )


def lowest_verdicts(
    head: VerdictHead, traces: Sequence[Trace], sentences: Sequence[NDArray[np.intp]]
) -> tuple[list[Verdict], float]:
    """The verdict of each sentence (token indices, at least one sentence) in the window where its probability
    is lowest, and the lowest probability of the answer. Raises RecordRejected where one is no probability.
    """
    seen, answers = zip(*(head.judge(trace, sentences) for trace in traces), strict=True)
    lowest = [min(windows, key=lambda verdict: verdict.probability) for windows in zip(*seen, strict=True)]
    verdicts = [verdict for window in seen for verdict in window]
    said = np.array([number for verdict in verdicts for number in astuple(verdict)] + list(answers))
    probabilities = np.array([verdict.probability for verdict in verdicts] + list(answers))
    if not (np.isfinite(said).all() and ((probabilities >= 0) & (probabilities <= 1)).all()):
        raise RecordRejected(RejectReason.SCORING_FAILED, "the bundle's head gave no probability")
    return lowest, min(answers)
