"""Scorer: the public door. Load a model; records in, measurements and findings out."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging

from detector import attention
from detector.aggregate import Measurement, measure
from detector.bundle import Bundle, embedded
from detector.calibration import TARGET_FPR, Reference
from detector.errors import ProfileError, RecordRejected, RejectReason, ScorerError
from detector.findings import Findings, find
from detector.identity import ScorerInfo, fingerprint, locate, no_model, place
from detector.noise import NoiseFloor, noise_floor
from detector.passes import Passes
from detector.probe import Keep, audit_keep
from detector.prompts import PROFILES, PromptProfile, Reading, read_record
from detector.record import Passage, Record
from detector.scorers import EMBEDDED
from detector.trace import Trace
from detector.vocabulary import Head
from detector.words import word_features

_HEAD_TOLERANCE = 2e-2  # relative; an unknown scaling or capping of logits is off by far more


class Scorer:
    """A small language model that re-reads logged answers. Not thread-safe; one per process or device."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any,
        info: ScorerInfo,
        profile: PromptProfile,
        bundle: Bundle | None = None,
    ) -> None:
        self.info = info
        self.profile = profile
        self.bundle = bundle
        self._judge = None if bundle is None else bundle.head()
        self.tokenizer = tokenizer
        self.model = model
        head = _checked_head(model, info.name)
        self._passes = Passes(model, head, info.dtype, profile.jsd_epsilon)

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
        bundle: Bundle | str | None = "auto",
    ) -> "Scorer":
        """Load by known name, hub id, local folder or GGUF file.

        `dtype` auto is float32 on a CPU and bfloat16 on a GPU. `window_tokens` defaults to what the model
        was trained for. Only safetensors and GGUF weights are read and no code of the model's is run.
        `bundle` is the trained head that judges: auto is the one that ships with the package where there is
        one for this scorer and profile; else a Bundle, the folder of one, or None.
        Raises ScorerError, and ProfileError for a bundle of another scorer or profile.
        """
        if profile not in PROFILES:
            raise ScorerError(f"profile {profile}: unknown; one of {', '.join(PROFILES)}")
        info = fingerprint(name, device=device, dtype=dtype, window_tokens=window_tokens, cache_dir=cache_dir)
        if bundle == "auto":
            bundle = embedded(name, info.fingerprint, profile)
        elif isinstance(bundle, str):
            bundle = Bundle.load(bundle)
        if bundle is not None:
            bundle.check(info, profile)
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
            )
            # Ours stands in for scaled-dot-product attention only. A family that must not run on it
            # (soft-capped scores, sinks) keeps its own: it can be scored, its attention cannot be read.
            usual = model.config._attn_implementation == "sdpa" and model._can_set_attn_implementation()
            if usual or info.reads_attention:  # whatever its config.json prefers
                model.set_attn_implementation(attention.NAME)
        except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
            raise ScorerError(no_model(name, error)) from None
        if not tokenizer.is_fast:
            raise ScorerError(f"scorer {name}: its tokenizer gives no offsets (it is not a fast tokenizer)")
        return cls(model.to(where).eval(), tokenizer, info, PROFILES[profile], bundle)

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

    @property
    def reads_attention(self) -> bool:
        """Whether `measure` reads the scorer's attention; where not, `blend` cannot judge."""
        return self.info.reads_attention

    def trace(
        self,
        record: Record,
        keep: Keep = Keep(),  # noqa: B008
        *,
        foil: Sequence[Passage] = (),
    ) -> tuple[Reading, tuple[Trace, ...]]:
        """Read a record under its conditions: one Trace per window. Raises RecordRejected.

        `foil`: the foreign passages that Keep(foil=True) reads the answer with (`lumina.pick_foil`).
        """
        reading = self._read(record)
        foreign = self._read(replace(record, passages=tuple(foil), undivided=False)).windows if foil else ()
        traces = [
            self._passes.trace(reading, window, keep, foreign[0].full if foreign else None)
            for window in reading.windows
        ]
        return reading, tuple(_with_words(record, trace, keep) for trace in traces)

    def trace_together(
        self,
        records: Sequence[Record],
        keep: Keep = Keep(),  # noqa: B008
    ) -> list[tuple[Reading, tuple[Trace, ...]]]:
        """The same for several answers to one question: what their prompts share is computed once.

        A trace differs from that of its record alone only by the rounding of sums. Raises RecordRejected.
        """
        readings = [self._read(record) for record in records]
        if any(len(reading.windows) > 1 or len(reading.segments) > 1 for reading in readings):
            return [self.trace(record, keep) for record in records]
        traces = self._passes.together(readings, keep)
        return [
            (reading, (_with_words(record, trace, keep),))
            for record, reading, trace in zip(records, readings, traces, strict=True)
        ]

    def trace_many(
        self,
        records: Sequence[Record],
        keep: Keep = Keep(),  # noqa: B008
    ) -> list[tuple[Reading, tuple[Trace, ...]] | RecordRejected]:
        """The same for any records, as many at once as a pack holds (`packed`); a RecordRejected in the place
        of one that cannot be read or measured.

        A trace differs from that of its record alone only by the rounding of sums. What several records share
        is counted (`n_computed_tokens`) for the first of them that was in the pack.
        """
        readings: list[Reading | RecordRejected] = []
        for record in records:
            try:
                readings.append(self._read(record))
            except RecordRejected as rejected:
                readings.append(rejected)
        found = iter(self._passes.many([one for one in readings if isinstance(one, Reading)], keep))
        out: list[tuple[Reading, tuple[Trace, ...]] | RecordRejected] = []
        for record, reading in zip(records, readings, strict=True):
            if isinstance(reading, RecordRejected):
                out.append(reading)
                continue
            traces = next(found)
            if isinstance(traces, RecordRejected):
                out.append(traces)
            else:
                out.append((reading, tuple(_with_words(record, trace, keep) for trace in traces)))
        return out

    def can_read(self, record: Record) -> bool:
        """Whether `trace` and `measure` would take the record; no forward pass."""
        try:
            self._read(record)
        except RecordRejected:
            return False
        return True

    def _read(self, record: Record) -> Reading:
        return read_record(record, self.tokenizer, self.profile, self.window_tokens)

    def measure(
        self,
        record: Record,
        *,
        leave_one_out: bool = True,
        masked: bool = False,
        least_share: float = 0.0,
        min_answer_tokens: int = 1,
    ) -> Measurement:
        """Numbers without opinions for every sentence and the response, and the verdicts of the bundle where
        there is one. `masked` hides each piece instead of removing it; `least_share` saves the passes of
        pieces that get less than this share of the attention (`probe.Keep`). Raises RecordRejected, and
        ProfileError for a bundle that needs exact leave-one-out of every piece.
        """
        keep = self._keep(leave_one_out, masked, least_share)
        return self._measured(record, *self.trace(record, keep), min_answer_tokens)

    def measure_many(
        self,
        records: Sequence[Record],
        *,
        leave_one_out: bool = True,
        masked: bool = False,
        least_share: float = 0.0,
        min_answer_tokens: int = 1,
    ) -> list[Measurement | RecordRejected]:
        """The same for many records, as many at once as a pack holds (`packed`); a RecordRejected in the
        place of one that cannot be measured. Raises ProfileError.
        """
        keep = self._keep(leave_one_out, masked, least_share)
        out: list[Measurement | RecordRejected] = []
        for record, found in zip(records, self.trace_many(records, keep), strict=True):
            try:
                if isinstance(found, RecordRejected):
                    raise found
                out.append(self._measured(record, *found, min_answer_tokens))
            except RecordRejected as rejected:
                out.append(rejected)
        return out

    @property
    def packed(self) -> bool:
        """Whether records run in packs, as they do on a GPU that can; elsewhere they are walked one by one.

        May be set, for tests and comparisons: the numbers are the same.
        """
        return self._passes.packed

    @packed.setter
    def packed(self, packed: bool) -> None:
        self._passes.packed = packed

    def _keep(self, leave_one_out: bool, masked: bool, least_share: float) -> Keep:
        judge = self._judge
        if judge is not None and judge.keep.leave_one_out and not leave_one_out:
            raise ProfileError("the bundle reads leave-one-out passes, which are off (loo)")
        if judge is not None and judge.keep.leave_one_out and masked:
            raise ProfileError("the bundle was fitted on exact leave-one-out passes, not masked ones (loo)")
        if judge is not None and judge.keep.leave_one_out and least_share:
            raise ProfileError("the bundle reads every leave-one-out pass, and some are saved (least_share)")
        return audit_keep(
            None if judge is None else judge.keep,
            leave_one_out=leave_one_out,
            masked=masked,
            least_share=least_share,
            reads_attention=self.reads_attention,
        )

    def _measured(
        self, record: Record, reading: Reading, traces: tuple[Trace, ...], min_answer_tokens: int
    ) -> Measurement:
        if len(reading.answer_ids) < min_answer_tokens:
            detail = f"{len(reading.answer_ids)} tokens, {min_answer_tokens} needed"
            raise RecordRejected(RejectReason.ANSWER_TOO_SHORT, detail)
        return measure(reading, record.answer, traces, len(record.passages), self._judge)

    def noise_floor(self) -> NoiseFloor:
        """How far its numbers move with the shape of the computation alone (`noise`); two short readings."""
        return noise_floor(self)

    def audit(
        self, record: Record, reference: Reference | None = None, *, method: str | None = None
    ) -> Findings:
        """Measure and judge one record, by the reference's deciding method where `method` names none.

        Without a reference the bundle decides, at its operating point of 5 % false alarms. Without either,
        the features of gasp are added unscaled (nats), which orders the sentences of one answer but is not
        comparable across scorers, and nothing is flagged. Raises RecordRejected.
        """
        if reference is None:
            reference = Reference.identity()
            if self.bundle is not None:
                threshold = self.bundle.card.operating_points.get(TARGET_FPR)
                reference = replace(reference, deciding_method=self.bundle.card.method, threshold=threshold)
        return find(record, self.measure(record), reference, method or reference.deciding_method)


def _with_words(record: Record, trace: Trace, keep: Keep) -> Trace:
    if not keep.words:
        return trace
    texts = [passage.text for passage in record.passages]
    return replace(trace, words=word_features(record.answer, trace.offsets, texts, record.question))


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
