"""Passes: the answers of one run through the model in, their Traces out.

What a run over the conditions leaves behind (last states, probes) is reduced over the vocabulary and put
together, segments of a long answer joined.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from detector.errors import DetectorError, RecordRejected, RejectReason
from detector.forward import last_rows, packed_rows, prefers_packs
from detector.lumina import mmd
from detector.memory import Sizes, most_pack_tokens
from detector.packed import LEAST_PACK_TOKENS, PACK_TOKENS, Load, fill
from detector.prefix_tree import Forest, Ids, hide
from detector.probe import Keep, Probe
from detector.prompts import Reading, Window
from detector.sentences import Span
from detector.trace import Trace
from detector.vocabulary import Head, Reduction, Tile, kernel_for, out_of_memory, reduce_vocabulary
from detector.windows import Layout, Segment


class Passes:
    """The forward passes of one model.

    They run in packs on a GPU and by a cached walk elsewhere, with the same numbers up to rounding.

    Where memory does not hold the vocabulary step, that step alone is done again in smaller tiles
    (`vocabulary.Tile`). A pack that does not fit is split in halves, and what does not fit alone is walked;
    where that does not fit either, torch's own error is raised.
    """

    def __init__(self, model: Any, head: Head, dtype: str, jsd_epsilon: float) -> None:
        self._body = model.base_model
        self._embeddings: Tensor = model.get_input_embeddings().weight.detach()
        self._head = head
        self._dtype = dtype
        self._epsilon = jsd_epsilon
        self._tile = Tile()
        self._packed: bool | None = None
        self.pack_tokens = PACK_TOKENS
        """How many tokens a pack may hold. On a GPU it is set by the memory that is free at first use, and it
        falls where memory does not hold a pack all the same.
        """

    @property
    def packed(self) -> bool:
        """Whether records run in packs. Found out at first use; may be set."""
        if self._packed is None:
            self._packed = prefers_packs(self._body)
            if self._packed:
                free_bytes, _ = torch.cuda.mem_get_info(self._embeddings.device)
                sizes = Sizes.of(self._body.config.to_dict(), self._dtype)
                self.pack_tokens = most_pack_tokens(sizes, free_bytes)
        return self._packed

    @packed.setter
    def packed(self, packed: bool) -> None:
        self._packed = packed

    def trace(self, reading: Reading, window: Window, keep: Keep, foil: Ids | None = None) -> Trace:
        """One window of one record. `foil`: the prompt with foreign passages, for Keep(foil=True)."""
        read = [
            self._alone([_Pass.of(reading, window, segment, keep, foil)], keep)[0]
            for segment in reading.segments
        ]
        return self._joined_trace(reading, window, read, keep)

    def together(self, readings: Sequence[Reading], keep: Keep) -> list[Trace]:
        """Several answers of one window and one segment each, in one run. There is no foil for them."""
        passes = [_Pass.of(reading, reading.windows[0], reading.segments[0], keep) for reading in readings]
        return [
            self._joined_trace(reading, reading.windows[0], [one], keep)
            for reading, one in zip(readings, self._alone(passes, keep), strict=True)
        ]

    def many(self, readings: Sequence[Reading], keep: Keep) -> list[list[Trace] | RecordRejected]:
        """Any records, as many in one pack as the budget holds: per record one Trace a window, or why not.

        The loads are a pure function of the records and the budget. A record is never split; one that is over
        the budget by itself is walked. There is no foil for them.
        """
        records = [
            [
                _Pass.of(reading, window, segment, keep)
                for window in reading.windows
                for segment in reading.segments
            ]
            for reading in readings
        ]
        found: list[list[Trace] | RecordRejected] = []
        budget = self.pack_tokens
        while (start := len(found)) < len(records):
            sequences = ([s for one in record for s in one.sequences] for record in records[start:])
            load = fill(sequences, budget, start) if self.packed else Load(start, start + 1, 0, fits=False)
            passes = [one for record in records[load.start : load.stop] for one in record]
            read = self._try(passes, keep, packed=load.fits)
            if read is None and load.fits:
                budget = self._halve(load.n_tokens)
                continue
            budget = self.pack_tokens
            if read is None:
                detail = "the device's memory does not hold this record"
                found.append(RecordRejected(RejectReason.SCORING_FAILED, detail))
                continue
            parts = iter(read)
            for reading in readings[load.start : load.stop]:
                own = [[next(parts) for _ in reading.segments] for _ in reading.windows]
                found.append(self._traces(reading, own, keep))
        return found

    def _traces(
        self, reading: Reading, read: Sequence[Sequence["_Read"]], keep: Keep
    ) -> list[Trace] | RecordRejected:
        try:
            return [
                self._joined_trace(reading, window, own, keep)
                for window, own in zip(reading.windows, read, strict=True)
            ]
        except RecordRejected as rejected:
            return rejected

    def _alone(self, passes: Sequence["_Pass"], keep: Keep) -> list["_Read"]:
        """The passes in one run: a pack where they fit one, else the walk."""
        if self.packed:
            load = fill([[s for one in passes for s in one.sequences]], self.pack_tokens)
            read = self._try(passes, keep, packed=True) if load.fits else None
            if read is not None:
                return read
            if load.fits:
                self._halve(load.n_tokens)
        return self._run(passes, keep, packed=False)

    def _try(self, passes: Sequence["_Pass"], keep: Keep, *, packed: bool) -> list["_Read"] | None:
        """All in one pack, or each walked; None where memory does not hold it."""
        try:
            if packed:
                return self._run(passes, keep, packed=True)
            return [self._run([one], keep, packed=False)[0] for one in passes]
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
        torch.cuda.empty_cache()  # out here, where the traceback no longer keeps the failed run's tensors
        return None

    def _halve(self, n_tokens: int) -> int:
        """The budget for another try of a load of so many tokens that memory did not hold."""
        self.pack_tokens = max(LEAST_PACK_TOKENS, min(self.pack_tokens, n_tokens // 2))
        return n_tokens // 2

    def _run(self, passes: Sequence["_Pass"], keep: Keep, *, packed: bool) -> list["_Read"]:
        """One run over the conditions of all passes."""
        sequences = [sequence for one in passes for sequence in one.sequences]
        n_rows = [len(one.scored) + keep.own_rows for one in passes for _ in one.sequences]
        firsts = np.cumsum([0, *(len(one.sequences) for one in passes)]).tolist()
        probes = [
            Probe(self._body, keep, one.layout, one.spans, one.positions, first, one.sentences)
            for one, first in zip(passes, firsts, strict=False)
            if keep.own_rows
        ]

        def wanted(sequence: int) -> bool:
            return all(probe.wants(sequence) for probe in probes)

        if packed:
            # What a walk would leave out has run here too. It is left out of the numbers all the same.
            hidden, n_tokens = packed_rows(self._body, sequences, n_rows, probes)
            forest = Forest()
            n_own = [forest.add(one.sequences) for one in passes]
            if sum(n_own) != n_tokens:
                raise AssertionError(f"a plan of {sum(n_own)} tokens ran as {n_tokens}")
        else:
            hidden, n_tokens = last_rows(self._body, sequences, n_rows, probes, wanted)
            # What several answers share is counted once, for the first of them.
            n_own = [n_tokens] + [0] * (len(passes) - 1)
        read = []
        for index, (one, first) in enumerate(zip(passes, firsts, strict=False)):
            run = [i for i in range(len(one.sequences)) if wanted(first + i)]
            rows = torch.stack([hidden[first + i] for i in run])[:, : len(one.scored)]
            targets = torch.tensor(one.scored, device=rows.device)
            with torch.inference_mode():
                kept = rows[: len(rows) - one.foil]
                kernel = kernel_for(self._head.weight, self._epsilon)
                step = kernel or partial(reduce_vocabulary, epsilon=self._epsilon)
                reduce = partial(step, kept, targets, self._head)
                part = _spread(self._tile.fit(reduce), run, len(one.sequences) - one.foil)
                compare = partial(mmd, rows[0], rows[-1], self._head, self._embeddings)
                moved = self._tile.fit(compare) if one.foil else None
            skipped = frozenset(range(len(one.sequences))) - set(run)
            read.append(_Read(part, probes[index] if probes else None, moved, n_own[index], skipped))
        return read

    def _joined_trace(self, reading: Reading, window: Window, read: Sequence["_Read"], keep: Keep) -> Trace:
        parts = [one.vocabulary for one in read]
        probes = [one.probe for one in read if one.probe is not None]
        logprob = _joined([part.logprob for part in parts])
        entropy = _joined([part.entropy for part in parts])
        jsd = _joined([part.jsd for part in parts])
        if not (np.isfinite(logprob).all() and np.isfinite(jsd).all()):
            raise RecordRejected(
                RejectReason.SCORING_FAILED, f"the scorer gave non-finite numbers in {self._dtype}"
            )
        more: dict[str, Any] = _probed(probes, keep)
        if keep.extremes:
            more |= {
                "top_logprob": _joined([part.top for part in parts])[:2],
                "bottom_logprob": _joined([part.bottom for part in parts])[:2],
                "rank": _joined([part.rank for part in parts])[:2],
            }
        if keep.foil:
            more["mmd_foil"] = _joined([one.mmd for one in read if one.mmd is not None])
        return Trace(
            token_ids=np.asarray(reading.answer_ids, dtype=np.int64),
            offsets=np.asarray(reading.offsets, dtype=np.int32).reshape(-1, 2),
            pieces=tuple(reading.pieces[i] for i in window.piece_indices),
            logprob=logprob[0],
            entropy=entropy[0],
            logprob_no_context=logprob[1],
            entropy_no_context=entropy[1],
            jsd_no_context=jsd[0],
            logprob_without=logprob[2:] if keep.leave_one_out else None,
            jsd_without=jsd[1:] if keep.leave_one_out else None,
            n_context_tokens=window.layout.passages[1] - window.layout.passages[0],
            n_prompt_tokens=len(window.full),
            n_computed_tokens=sum(one.n_tokens for one in read),
            n_header_tokens=len(window.full) - window.layout.header,
            truncated=reading.truncated,
            skipped=tuple(sorted(i - 2 for i in frozenset.intersection(*(one.skipped for one in read)))),
            **more,
        )


@dataclass(frozen=True, slots=True)
class _Pass:
    """One segment of an answer after each prompt of one window."""

    sequences: tuple[Ids, ...]
    scored: Ids
    layout: Layout
    spans: tuple[Span, ...]
    """Where the pieces stand in the full condition."""
    positions: tuple[int, int]
    """Where the scored tokens stand in the full condition, start:stop."""
    sentences: tuple[Ids, ...]
    """Which of the scored tokens belong to one sentence, for each that has any here."""
    foil: bool
    """Whether the last sequence holds foreign passages."""

    @classmethod
    def of(
        cls, reading: Reading, window: Window, segment: Segment, keep: Keep, foil: Ids | None = None
    ) -> "_Pass":
        if keep.foil and foil is None:
            raise DetectorError(
                "lumina reads the answer with foreign passages, and none were given: trace with foil=..."
            )
        scored = reading.answer_ids[segment.start : segment.stop]
        # The last answer token predicts nothing that is scored: it is computed for its own row alone.
        tail = reading.answer_ids[segment.tail : segment.stop - (not keep.own_rows)]
        first = len(window.full) + segment.start - segment.tail
        sequences = [window.full + tail, window.none + tail]
        if keep.leave_one_out and keep.masked:
            stop = window.layout.passages[1]
            read, rest = window.full[:stop], window.full[stop:] + tail
            sequences += [read + hide(rest, *span) for span in window.spans]
        elif keep.leave_one_out:
            sequences += [prompt + tail for prompt in window.without]
        if foil is not None:
            sequences.append(foil + tail)
        return cls(
            tuple(sequences),
            scored,
            window.layout,
            window.spans,
            (first, first + len(scored)),
            _sentences(reading, segment),
            foil is not None,
        )


@dataclass(frozen=True, slots=True)
class _Read:
    """What one pass left behind."""

    vocabulary: Reduction
    probe: Probe | None
    mmd: Tensor | None
    n_tokens: int
    skipped: frozenset[int]
    """Sequences of the pass that were not run."""


def _sentences(reading: Reading, segment: Segment) -> tuple[Ids, ...]:
    offsets = reading.offsets[segment.start : segment.stop]
    found = (
        tuple(i for i, (a, b) in enumerate(offsets) if a < end and b > start)
        for start, end in reading.sentences
    )
    return tuple(tokens for tokens in found if tokens)


def _spread(found: Reduction, run: list[int], n_conditions: int) -> Reduction:
    """The same for all conditions; one that was not run counts as equal to the first, without divergence."""
    if len(found.logprob) == n_conditions:
        return found
    where = [run.index(i) if i in run else 0 for i in range(n_conditions)]
    jsd = torch.cat([torch.zeros_like(found.logprob[:1]), found.jsd])[where][1:]
    others = (found.top[where], found.bottom[where], found.rank[where])
    return Reduction(found.logprob[where], found.entropy[where], jsd, *others)


def _joined(parts: list[Tensor]) -> np.ndarray[Any, np.dtype[Any]]:
    # float64 models (reference runs) keep their precision.
    return np.asarray(torch.cat(parts, dim=-1).cpu().numpy())


def _probed(probes: list[Probe], keep: Keep) -> dict[str, Any]:
    """The Trace fields that probes kept, the segments of an answer joined.

    Each segment has one row more than tokens: where it ends and another begins, the next one's first row
    (which predicts the same token) stands for both.
    """
    found: dict[str, Any] = {}
    last = len(probes) - 1

    def rows(parts: list[Tensor], axis: int) -> np.ndarray[Any, np.dtype[Any]]:
        cut = [p if i == last else p.narrow(axis, 0, p.shape[axis] - 1) for i, p in enumerate(parts)]
        return _array(torch.cat(cut, dim=axis))

    if keep.attention:
        passages, answer = zip(*(probe.attention() for probe in probes), strict=True)
        found |= {"attention_passages": rows(list(passages), 2), "attention_answer": rows(list(answer), 2)}
    if keep.piece_attention:
        found["attention_pieces"] = rows([probe.piece_attention() for probe in probes], 1)
    if keep.layers:
        states = [probe.states() for probe in probes]
        found |= {"layers": keep.layers, "states": rows(states, 2)}
        if keep.carried:
            carried = [p.carried(s) for p, s in zip(probes, states, strict=True)]
            found["carried"] = _array(torch.cat(carried, dim=1))
    return found


def _array(tensor: Tensor) -> np.ndarray[Any, np.dtype[Any]]:
    """float32, from whatever a model computes in; a float64 model (reference runs) keeps its precision."""
    return np.asarray((tensor if tensor.dtype == torch.float64 else tensor.float()).cpu().numpy())
