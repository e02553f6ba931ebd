"""Scorer: the public door. Load a model; records in, measurements and findings out."""

from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging

from detector.aggregate import Measurement, measure
from detector.calibration import Reference
from detector.errors import RecordRejected, RejectReason, ScorerError
from detector.findings import Findings, find
from detector.forward import last_rows
from detector.identity import ScorerInfo, fingerprint, locate, no_model, place
from detector.prompts import PROFILES, PromptProfile, Reading, Window, read_record
from detector.record import Record
from detector.scorers import EMBEDDED
from detector.trace import Trace
from detector.vocabulary import Head, Reduction, reduce_vocabulary

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
        try:
            tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
            model = AutoModelForCausalLM.from_pretrained(
                source,
                dtype=getattr(torch, dtype_name),
                trust_remote_code=False,
                use_safetensors=True,
                attn_implementation="sdpa",
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

    def trace(self, record: Record, *, leave_one_out: bool = True) -> tuple[Reading, tuple[Trace, ...]]:
        """Read a record under its conditions: one Trace per window. Raises RecordRejected."""
        reading = read_record(record, self.tokenizer, self.profile, self.window_tokens)
        return reading, tuple(
            self._trace_window(reading, window, leave_one_out) for window in reading.windows
        )

    def measure(
        self, record: Record, *, leave_one_out: bool = True, min_answer_tokens: int = 1
    ) -> Measurement:
        """Numbers without opinions for every sentence and the response. Raises RecordRejected."""
        reading, traces = self.trace(record, leave_one_out=leave_one_out)
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

    def _trace_window(self, reading: Reading, window: Window, leave_one_out: bool) -> Trace:
        prompts = (window.full, window.none, *(window.without if leave_one_out else ()))
        parts: list[Reduction] = []
        n_computed = 0
        for segment in reading.segments:
            scored = reading.answer_ids[segment.start : segment.stop]
            # The last answer token predicts nothing that is scored, so it is never computed.
            tail = reading.answer_ids[segment.tail : segment.stop - 1]
            hidden, n_tokens = last_rows(self._body, [p + tail for p in prompts], len(scored))
            targets = torch.tensor(scored, device=hidden.device)
            with torch.inference_mode():
                parts.append(reduce_vocabulary(hidden, targets, self._head, epsilon=self.profile.jsd_epsilon))
            n_computed += n_tokens
        logprob = _joined([part.logprob for part in parts])
        entropy = _joined([part.entropy for part in parts])
        jsd = _joined([part.jsd for part in parts])
        if not (np.isfinite(logprob).all() and np.isfinite(jsd).all()):
            raise RecordRejected(
                RejectReason.SCORING_FAILED, f"the scorer gave non-finite numbers in {self.dtype}"
            )
        return Trace(
            token_ids=np.asarray(reading.answer_ids, dtype=np.int64),
            offsets=np.asarray(reading.offsets, dtype=np.int32).reshape(-1, 2),
            pieces=tuple(reading.pieces[i] for i in window.piece_indices),
            logprob=logprob[0],
            entropy=entropy[0],
            logprob_no_context=logprob[1],
            entropy_no_context=entropy[1],
            jsd_no_context=jsd[0],
            logprob_without=logprob[2:] if leave_one_out else None,
            jsd_without=jsd[1:] if leave_one_out else None,
            n_context_tokens=len(window.full) - len(window.none),
            n_prompt_tokens=len(window.full),
            n_computed_tokens=n_computed,
            truncated=reading.truncated,
        )


def _joined(parts: list[Tensor]) -> np.ndarray[Any, np.dtype[np.float32]]:
    # float64 models (reference runs) keep their precision.
    return np.asarray(torch.cat(parts, dim=-1).cpu().numpy())


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
