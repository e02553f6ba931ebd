"""Scorer: the public door. Load a model; records in, measurements and findings out."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging

from detector import attention
from detector.aggregate import Measurement, measure
from detector.calibration import Reference
from detector.errors import RecordRejected, RejectReason, ScorerError
from detector.findings import Findings, find
from detector.forward import last_rows
from detector.identity import ScorerInfo, fingerprint, locate, no_model, place
from detector.prefix_tree import Ids
from detector.probe import Keep, Probe
from detector.prompts import PROFILES, PromptProfile, Reading, Window, read_record
from detector.record import Record
from detector.scorers import EMBEDDED
from detector.trace import Trace
from detector.vocabulary import Head, Reduction, reduce_vocabulary
from detector.windows import Layout, Segment

_HEAD_TOLERANCE = 2e-2  # relative; an unknown scaling or capping of logits is off by far more


class Scorer:
    """A small language model that re-reads logged answers. Not thread-safe; one per process or device."""

    def __init__(
        self, model: PreTrainedModel, tokenizer: Any, info: ScorerInfo, profile: PromptProfile
    ) -> None:
        self.info = info
        self.profile = profile
        self.tokenizer = tokenizer
        self.model = model
        self._body = model.base_model
        self._head = _checked_head(model, info.name)

    @classmethod
    def load(
        cls,
        name: str = EMBEDDED,
        *,
        device: str = "auto",
        dtype: str = "auto",
        window_tokens: int | None = None,
        cache_dir: str | None = None,
        profile: str = "plain",
    ) -> "Scorer":
        """Load by known name, hub id, local folder or GGUF file.

        `dtype` auto is float32 on a CPU and bfloat16 on a GPU. `window_tokens` defaults to what the model
        was trained for. Only safetensors and GGUF weights are read and no code of the model's is run.
        Raises ScorerError.
        """
        if profile not in PROFILES:
            raise ScorerError(f"profile {profile}: unknown; one of {', '.join(PROFILES)}")
        info = fingerprint(name, device=device, dtype=dtype, window_tokens=window_tokens, cache_dir=cache_dir)
        source = locate(name, cache_dir)
        where, dtype_name = place(device, dtype)
        logging.disable_progress_bar()
        attention.register()
        try:
            tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
            model = AutoModelForCausalLM.from_pretrained(
                source,
                dtype=getattr(torch, dtype_name),
                trust_remote_code=False,
                use_safetensors=True,
                attn_implementation=attention.NAME,
            )
        except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
            raise ScorerError(no_model(name, error)) from None
        if not tokenizer.is_fast:
            raise ScorerError(f"scorer {name}: its tokenizer gives no offsets (it is not a fast tokenizer)")
        return cls(model.to(where).eval(), tokenizer, info, PROFILES[profile])

    @property
    def name(self) -> str:
        """The name that it was loaded by."""
        return self.info.name

    @property
    def fingerprint(self) -> str:
        """12 hex digits of configuration, tokenizer and weights."""
        return self.info.fingerprint

    @property
    def window_tokens(self) -> int:
        """How many tokens one reading may take, answer included."""
        return self.info.window_tokens

    @property
    def dtype(self) -> str:
        """The dtype of the weights; sums always run in float32 or better."""
        return self.info.dtype

    def trace(self, record: Record, keep: Keep = Keep()) -> tuple[Reading, tuple[Trace, ...]]:  # noqa: B008
        """Read a record under its conditions: one Trace per window. Raises RecordRejected."""
        reading = read_record(record, self.tokenizer, self.profile, self.window_tokens)
        return reading, tuple(self._trace_window(reading, window, keep) for window in reading.windows)

    def trace_together(
        self,
        records: Sequence[Record],
        keep: Keep = Keep(),  # noqa: B008
    ) -> list[tuple[Reading, tuple[Trace, ...]]]:
        """The same for several answers to one question: what their prompts share is computed once.

        A trace differs from that of its record alone only by the rounding of sums. Raises RecordRejected.
        """
        readings = [read_record(r, self.tokenizer, self.profile, self.window_tokens) for r in records]
        if any(len(reading.windows) > 1 or len(reading.segments) > 1 for reading in readings):
            return [self.trace(record, keep) for record in records]
        passes = [_Pass.of(reading, reading.windows[0], reading.segments[0], keep) for reading in readings]
        read = self._run(passes, keep)
        return [
            (reading, (self._joined_trace(reading, reading.windows[0], [one], keep),))
            for reading, one in zip(readings, read, strict=True)
        ]

    def measure(
        self, record: Record, *, leave_one_out: bool = True, min_answer_tokens: int = 1
    ) -> Measurement:
        """Numbers without opinions for every sentence and the response. Raises RecordRejected."""
        reading, traces = self.trace(record, Keep(leave_one_out=leave_one_out))
        if len(reading.answer_ids) < min_answer_tokens:
            detail = f"{len(reading.answer_ids)} tokens, {min_answer_tokens} needed"
            raise RecordRejected(RejectReason.ANSWER_TOO_SHORT, detail)
        return measure(reading, record.answer, traces, len(record.passages))

    def audit(self, record: Record, reference: Reference | None = None, *, method: str = "gasp") -> Findings:
        """Measure and judge one record.

        Without `reference` statistics the features are added unscaled (nats), which orders the sentences of
        one answer but is not comparable across scorers, and nothing is flagged. Raises RecordRejected.
        """
        return find(record, self.measure(record), reference or Reference.identity(), method)

    def _trace_window(self, reading: Reading, window: Window, keep: Keep) -> Trace:
        read = [self._run([_Pass.of(reading, window, s, keep)], keep)[0] for s in reading.segments]
        return self._joined_trace(reading, window, read, keep)

    def _run(self, passes: Sequence["_Pass"], keep: Keep) -> list["_Read"]:
        """One walk over the conditions of all passes."""
        sequences = [sequence for one in passes for sequence in one.sequences]
        n_rows = [len(one.scored) + keep.own_rows for one in passes for _ in one.sequences]
        firsts = np.cumsum([0, *(len(one.sequences) for one in passes)]).tolist()
        probes = [
            Probe(self._body, keep, one.layout, one.positions, first)
            for one, first in zip(passes, firsts, strict=False)
            if keep.own_rows
        ]
        hidden, n_tokens = last_rows(self._body, sequences, n_rows, probes)
        read = []
        for index, (one, first) in enumerate(zip(passes, firsts, strict=False)):
            rows = torch.stack(hidden[first : first + len(one.sequences)])[:, : len(one.scored)]
            targets = torch.tensor(one.scored, device=rows.device)
            with torch.inference_mode():
                part = reduce_vocabulary(rows, targets, self._head, epsilon=self.profile.jsd_epsilon)
            # What several answers share is counted once, for the first of them.
            read.append(_Read(part, probes[index] if probes else None, 0 if index else n_tokens))
        return read

    def _joined_trace(self, reading: Reading, window: Window, read: Sequence["_Read"], keep: Keep) -> Trace:
        parts = [one.vocabulary for one in read]
        probes = [one.probe for one in read if one.probe is not None]
        logprob = _joined([part.logprob for part in parts])
        entropy = _joined([part.entropy for part in parts])
        jsd = _joined([part.jsd for part in parts])
        if not (np.isfinite(logprob).all() and np.isfinite(jsd).all()):
            raise RecordRejected(
                RejectReason.SCORING_FAILED, f"the scorer gave non-finite numbers in {self.dtype}"
            )
        more: dict[str, Any] = _probed(probes, keep)
        if keep.extremes:
            more |= {
                "top_logprob": _joined([part.top for part in parts])[:2],
                "bottom_logprob": _joined([part.bottom for part in parts])[:2],
                "rank": _joined([part.rank for part in parts])[:2],
            }
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
            n_context_tokens=len(window.full) - len(window.none),
            n_prompt_tokens=len(window.full),
            n_computed_tokens=sum(one.n_tokens for one in read),
            n_header_tokens=len(window.full) - window.layout.header,
            truncated=reading.truncated,
            **more,
        )


@dataclass(frozen=True, slots=True)
class _Pass:
    """One segment of an answer after each prompt of one window."""

    sequences: tuple[Ids, ...]
    scored: Ids
    layout: Layout
    positions: tuple[int, int]
    """Where the scored tokens stand in the full condition, start:stop."""

    @classmethod
    def of(cls, reading: Reading, window: Window, segment: Segment, keep: Keep) -> "_Pass":
        prompts = (window.full, window.none, *(window.without if keep.leave_one_out else ()))
        scored = reading.answer_ids[segment.start : segment.stop]
        # The last answer token predicts nothing that is scored: it is computed for its own row alone.
        tail = reading.answer_ids[segment.tail : segment.stop - (not keep.own_rows)]
        first = len(window.full) + segment.start - segment.tail
        return cls(
            tuple(prompt + tail for prompt in prompts), scored, window.layout, (first, first + len(scored))
        )


@dataclass(frozen=True, slots=True)
class _Read:
    """What one pass left behind."""

    vocabulary: Reduction
    probe: Probe | None
    n_tokens: int


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

    def rows(parts: list[Tensor], axis: int) -> np.ndarray[Any, np.dtype[np.float32]]:
        cut = [p if i == last else p.narrow(axis, 0, p.shape[axis] - 1) for i, p in enumerate(parts)]
        return np.asarray(torch.cat(cut, dim=axis).float().cpu().numpy())

    if keep.attention:
        passages, answer = zip(*(probe.attention() for probe in probes), strict=True)
        found |= {"attention_passages": rows(list(passages), 2), "attention_answer": rows(list(answer), 2)}
    if keep.layers:
        states = [probe.states() for probe in probes]
        found |= {"layers": keep.layers, "states": rows(states, 2)}
        if keep.carried:
            carried = [p.carried(s) for p, s in zip(probes, states, strict=True)]
            found["carried"] = np.asarray(torch.cat(carried, dim=1).float().cpu().numpy())
    return found


def _checked_head(model: PreTrainedModel, name: str) -> Head:
    """The model's output layer as a Head, compared once with the logits that the model itself makes.

    Some families scale or cap logits after the output layer (Gemma, Granite, Cohere). Those known here are
    applied; an unknown one is refused rather than scored wrongly.
    """
    layer = model.get_output_embeddings()
    if layer is None or not hasattr(layer, "weight"):
        raise ScorerError(f"scorer {name}: has no output layer, so it is not a causal language model")
    config = model.config
    scale = getattr(config, "logit_scale", None) or 1.0
    head = Head(
        weight=layer.weight.detach(),
        bias=None if getattr(layer, "bias", None) is None else layer.bias.detach(),
        scale=scale / (getattr(config, "logits_scaling", None) or 1.0),
        softcap=getattr(config, "final_logit_softcapping", None),
    )
    ids = torch.arange(8, device=head.weight.device)[None] % head.weight.shape[0]
    with torch.inference_mode():
        theirs = model(input_ids=ids, use_cache=False).logits[0].to(head.accumulator)
        ours = head.logits(model.base_model(input_ids=ids, use_cache=False).last_hidden_state[0])
    error = (theirs - ours).abs().max() / theirs.abs().max().clamp_min(1e-6)
    if not error < _HEAD_TOLERANCE:
        raise ScorerError(
            f"scorer {name}: {type(model).__name__} changes its logits in a way Leadline does not know "
            "(or gives non-finite ones in this dtype); use another scorer or --set scorer.dtype=float32"
        )
    return head
