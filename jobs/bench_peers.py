"""Who is measured: the modes of Leadline, and other ways to the same numbers from the same weights.

exact, masked, off   Leadline's leave-one-out modes
gasp-rag             the GASP author's package: one condition at a time, logits at every position
reference            the same work without the package, for machines that do not have it
separate             K + 2 plain passes, logits for the answer's rows only
padded               one padded batch of the K + 2 conditions, logits for the answer's rows only
"""

import importlib.util
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from detector import attention
from detector.aggregate import measure
from detector.identity import locate, place
from detector.probe import Keep
from detector.prompts import PROFILES, UNDIVIDED_GROUPS, read_record
from detector.record import Record
from detector.scorer import Scorer
from detector.trace import Trace
from jobs.errors import ConfigError

MODES = ("exact", "masked", "off")
PEERS = ("gasp-rag", "reference", "separate", "padded")
GASP_RAG = "gasp-rag==0.2.1"

_EVERYTHING = 1 << 30  # more tokens than any record has: the package shall not cut what we read


@dataclass(frozen=True, slots=True)
class ScorerSpec:
    """What it takes to load the same scorer again, in this process or in another."""

    name: str
    device: str = "auto"
    dtype: str = "auto"
    window_tokens: int | None = None
    cache_dir: str | None = None
    profile: str = "plain"

    def load(self) -> Scorer:
        """The scorer without a bundle: what is measured are the passes and their reductions."""
        return Scorer.load(**asdict(self), bundle=None)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What reading one record came to."""

    n_tokens: int
    """Tokens that went through the body, padding included."""
    numbers: dict[str, np.ndarray]
    """For comparison: `logprob` (K + 2, A) and `jsd` (K + 1, A), or sentence `features` (n, 4), in nats."""


Read = Callable[[Record], Outcome]


def check(modes: Sequence[str], peers: Sequence[str]) -> None:
    """Raises ConfigError for a name that is unknown and for a package that is not installed."""
    for option, given, known in (("--loo", modes, MODES), ("--against", peers, PEERS)):
        for name in given:
            if name not in known:
                raise ConfigError(f"{option} {name}: unknown; one or more of {','.join(known)}")
    if not modes:
        raise ConfigError("--loo: name at least one mode to measure")
    if "gasp-rag" in peers and importlib.util.find_spec("gasp") is None:
        raise ConfigError(
            f"--against gasp-rag: the package is not installed; pip install {GASP_RAG}, or use "
            "--against reference (the same work without the package)"
        )


def reader(name: str, spec: ScorerSpec, scorer: Scorer | None = None) -> Read:
    """The way called `name` to read a record. Loads the scorer where none is given and one is needed."""
    if name == "gasp-rag":
        return _GaspRag(spec).read
    scorer = scorer or spec.load()
    if name in MODES:
        return _Mode(scorer, name).read
    return _Plain(scorer, name).read


def largest_difference(one: Outcome, other: Outcome) -> dict[str, float]:
    """Of the numbers that both have in the same shape, in nats."""
    return {
        name: float(np.abs(values - other.numbers[name]).max(initial=0.0))
        for name, values in one.numbers.items()
        if name in other.numbers and other.numbers[name].shape == values.shape
    }


def keep_of(loo: str) -> Keep:
    """What a leave-one-out mode keeps of the passes."""
    return Keep(leave_one_out=loo != "off", masked=loo == "masked")


class _Mode:
    """Leadline: passes, reductions, and the means over sentences."""

    def __init__(self, scorer: Scorer, loo: str) -> None:
        self._scorer = scorer
        self._keep = keep_of(loo)

    def read(self, record: Record) -> Outcome:
        reading, traces = self._scorer.trace(record, self._keep)
        found = measure(reading, record.answer, traces, len(record.passages))
        rows = [
            [f.gap, f.jsd_none, f.max_drop or 0.0, f.max_jsd or 0.0]
            for f in (sentence.features for sentence in found.sentences)
        ]
        numbers = _numbers(traces[0]) if len(traces) == 1 else {}
        return Outcome(found.n_computed_tokens, numbers | {"features": np.array(rows)})


class _GaspRag:
    """The author's package on its own copy of the weights, cutting nothing that we do not cut."""

    def __init__(self, spec: ScorerSpec) -> None:
        from gasp import GASP

        self._profile, self._window = PROFILES[spec.profile], spec.window_tokens or _EVERYTHING
        self._same_prompts = spec.profile == "gasp-v2"
        limits = (
            {} if self._same_prompts else dict.fromkeys(("max_ctx_tokens", "max_ans_tokens"), _EVERYTHING)
        )
        source = str(locate(spec.name, spec.cache_dir))
        device, dtype = place(spec.device, spec.dtype)
        with warnings.catch_warnings(), torch.no_grad():  # which it sets for the whole process
            warnings.simplefilter("ignore")  # it names an argument of transformers that is deprecated
            self._package = GASP(source, device=device, dtype=dtype, **limits)
        self._n_tokens = 0
        self._package.scorer.model.register_forward_pre_hook(self._count)

    def read(self, record: Record) -> Outcome:
        context = "\n".join(passage.text for passage in record.passages)
        self._package.k_chunks = UNDIVIDED_GROUPS if self._same_prompts else self._n_pieces(record)
        self._n_tokens = 0
        with torch.no_grad():
            found = self._package.detect(context=context, answer=record.answer, query=record.question)
        names = ("gap", "jsd_noctx", "max_drop", "max_jsd")
        rows = [[sentence.features[name] for name in names] for sentence in found]
        return Outcome(self._n_tokens, {"features": np.array(rows)} if self._same_prompts else {})

    def _n_pieces(self, record: Record) -> int:
        tokenizer = self._package.scorer.tokenizer
        return len(read_record(record, tokenizer, self._profile, self._window).pieces)

    def _count(self, _module: Any, inputs: tuple[Any, ...]) -> None:
        self._n_tokens += inputs[0].numel()


class _Plain:
    """Plain passes of the unmodified model: `separate`, `padded` or, with logits everywhere, `reference`."""

    def __init__(self, scorer: Scorer, name: str) -> None:
        self._scorer, self._model, self._name = scorer, scorer.model, name
        self._n_tokens = 0

    @torch.inference_mode()
    def read(self, record: Record) -> Outcome:
        scorer, self._n_tokens = self._scorer, 0
        reading = read_record(record, scorer.tokenizer, scorer.profile, scorer.window_tokens)
        parts = []
        with _own_attention(self._model):
            for window, segment in product(reading.windows, reading.segments):
                answer = reading.answer_ids[segment.tail : segment.stop]
                prompts = (window.full, window.none, *window.without)
                targets = torch.tensor(reading.answer_ids[segment.start : segment.stop])
                parts.append(self._reduce([(*prompt, *answer) for prompt in prompts], targets))
        logprob, jsd = parts[0]
        one = len(parts) == 1
        return Outcome(self._n_tokens, {"logprob": _array(logprob), "jsd": _array(jsd)} if one else {})

    def _reduce(self, sequences: list[tuple[int, ...]], targets: Tensor) -> tuple[Tensor, Tensor]:
        """(K + 2, A) log-probabilities and (K + 1, A) divergences from the first, written down plainly."""
        targets = targets.to(self._model.device)
        logits = self._padded if self._name == "padded" else self._one_by_one
        full: Tensor | None = None
        realised, divergences = [], []
        for rows in logits(sequences, len(targets)):
            logp = torch.log_softmax(rows.float(), dim=-1)
            realised.append(logp.gather(-1, targets[:, None])[:, 0])
            if full is None:
                full = logp
            else:
                divergences.append(_jsd(full, logp))
        return torch.stack(realised), torch.stack(divergences)

    def _one_by_one(self, sequences: list[tuple[int, ...]], n_rows: int) -> Any:
        n_logits = 0 if self._name == "reference" else n_rows + 1  # 0: at every position
        for sequence in sequences:
            ids = torch.tensor([sequence], device=self._model.device)
            self._n_tokens += ids.numel()
            logits = self._model(input_ids=ids, use_cache=False, logits_to_keep=n_logits).logits
            yield logits[0, -n_rows - 1 : -1]

    def _padded(self, sequences: list[tuple[int, ...]], n_rows: int) -> Any:
        longest = max(map(len, sequences))
        gaps = torch.tensor([longest - len(sequence) for sequence in sequences])[:, None]
        ids = torch.tensor([[0] * (longest - len(sequence)) + list(sequence) for sequence in sequences])
        at = torch.arange(longest)[None] - gaps  # padding on the left: answers end together
        device = self._model.device
        self._n_tokens += ids.numel()
        logits = self._model(
            input_ids=ids.to(device),
            attention_mask=(at >= 0).long().to(device),
            position_ids=at.clamp(min=0).to(device),
            use_cache=False,
            logits_to_keep=n_rows + 1,
        ).logits
        yield from logits[:, :-1]


@contextmanager
def _own_attention(model: Any) -> Iterator[None]:
    """The model as transformers runs it, without our attention function, while it lasts."""
    ours = model.config._attn_implementation == attention.NAME
    if ours:
        model.set_attn_implementation("sdpa")
    try:
        yield
    finally:
        if ours:
            model.set_attn_implementation(attention.NAME)


def _jsd(logp: Tensor, logq: Tensor) -> Tensor:
    p, q = logp.exp(), logq.exp()
    mixture = ((p + q) / 2).clamp_min(torch.finfo(p.dtype).tiny).log()
    return ((p * (logp - mixture)).sum(-1) + (q * (logq - mixture)).sum(-1)).div(2).clamp_min(0.0)


def _numbers(trace: Trace) -> dict[str, np.ndarray]:
    if trace.logprob_without is None or trace.jsd_without is None:
        return {}
    logprob = np.concatenate([trace.logprob[None], trace.logprob_no_context[None], trace.logprob_without])
    return {"logprob": logprob, "jsd": np.concatenate([trace.jsd_no_context[None], trace.jsd_without])}


def _array(tensor: Tensor) -> np.ndarray:
    return np.asarray(tensor.cpu().numpy())
