"""Lookback Lens: how much a head looks back at the context, and a linear model over all heads.

A head that copies evidence spreads its attention over the prompt; one that continues its own text looks at
the answer so far. Per layer, head and answer token (Chuang et al. 2024, equations 1-3):

    ratio = mean attention per context key / (that + mean attention per key of the answer so far)

The reference counts everything before the answer's header as context, and the header with the answer so far;
it reads the row that predicts the token. The article (`probabilities-and-attention`) takes plain shares of
attention instead of means per key, and the passages alone as context.

A feature averaged over a span and put through a linear model is the linear model averaged over the span, so
scoring never forms the features of a span: token log-odds are averaged.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from detector.errors import DetectorError
from detector.heads import F64, Labelled, Tokens
from detector.logistic import Logistic, sigmoid
from detector.trace import F32, Trace

WINDOW_TOKENS = 8
"""Length of a window, as in the reference."""

WINDOW_STEP = 4
"""Every fourth window is trained on: neighbours share seven tokens of eight, and memory is a quarter."""

Row = Literal["predicting", "own"]
Context = Literal["prompt", "passages"]


def ratios(
    trace: Trace, *, per_key: bool = True, row: Row = "predicting", context: Context = "prompt"
) -> F32:
    """(A, L * H) lookback ratios in [0, 1], layer by layer; low = the head attends to the answer's own text.

    `per_key` divides each side by its number of keys (the reference); else plain shares are compared (the
    article). `row`: the position that predicts the token, or the token's own, where the token is itself part
    of the answer so far. A head that attends to neither side gets 0.5. In layers with a sliding window, keys
    out of sight count too, as they do in the reference. Where an answer was read in segments, keys that a
    later segment no longer sees count as well. Raises DetectorError where attention was not kept.
    """
    if trace.attention_answer is None or trace.attention_passages is None:
        raise DetectorError(
            "lookback reads attention, which this trace does not hold: measure with Keep(attention=True)"
        )
    n_tokens = len(trace.token_ids)
    first = 1 if row == "own" else 0
    rows = np.arange(first, first + n_tokens)
    answer = trace.attention_answer[:, :, rows].astype(np.float64)
    if context == "prompt":
        looked_back = np.maximum(1.0 - answer, 0.0)
        n_context = trace.n_prompt_tokens - trace.n_header_tokens
    else:
        looked_back = trace.attention_passages[:, :, rows].astype(np.float64)
        n_context = trace.n_context_tokens
    if per_key:
        # Row i stands behind the header and i answer tokens. No keys, no attention: 0 / 1.
        looked_back /= max(n_context, 1)
        answer /= np.maximum(trace.n_header_tokens + rows, 1)
    total = looked_back + answer
    found = np.divide(looked_back, total, out=np.full_like(total, 0.5), where=total > 0)
    return np.ascontiguousarray(found.reshape(-1, n_tokens).T, dtype=np.float32)


@dataclass(frozen=True, slots=True)
class LookbackHead:
    """Two logistic regressions over lookback ratios: one of whole sentences, one of 8-token windows.

    Tokens are scored by windows. Sentences are scored by the sentence model, or, with `by_window`, by their
    worst token.
    """

    sentence_model: Logistic
    window_model: Logistic
    by_window: bool = False
    per_key: bool = True
    row: Row = "predicting"
    context: Context = "prompt"

    def tokens(self, trace: Trace, sentences: Sequence[Tokens]) -> F64:
        """(A,) mean probability of the windows that hold the token, in [0, 1]. Higher = less grounded.

        The mean and not the maximum: a maximum would stretch every flag by seven tokens to either side. A
        window counts as unsupported if any of its tokens is, so these run above a token's own probability.
        """
        logit = self.window_model.logit(self._ratios(trace))
        width = min(WINDOW_TOKENS, len(logit))
        windows = sigmoid(sliding_window_view(logit, width).mean(axis=-1))
        ones = np.ones(width)
        return np.convolve(windows, ones) / np.convolve(np.ones_like(windows), ones)

    def sentences(self, trace: Trace, sentences: Sequence[Tokens]) -> F64:
        """(n,) probability that the sentence is unsupported, in [0, 1]. Higher = less grounded."""
        if self.by_window:
            tokens = self.tokens(trace, sentences)
            return np.array([tokens[members].max() for members in sentences], dtype=np.float64)
        logit = self.sentence_model.logit(self._ratios(trace))
        return sigmoid(np.array([logit[members].mean() for members in sentences], dtype=np.float64))

    def to_parts(self) -> dict[str, Any]:
        """Both models' arrays under `sentence_` and `window_`, and the options as numbers and names."""
        return {
            **{f"sentence_{name}": value for name, value in self.sentence_model.to_parts().items()},
            **{f"window_{name}": value for name, value in self.window_model.to_parts().items()},
            "by_window": int(self.by_window),
            "per_key": int(self.per_key),
            "row": self.row,
            "context": self.context,
        }

    def _ratios(self, trace: Trace) -> F32:
        found = ratios(trace, per_key=self.per_key, row=self.row, context=self.context)
        if found.shape[1] != len(self.window_model.weight):
            raise DetectorError(
                f"lookback head: trained on {len(self.window_model.weight)} heads, this trace has "
                f"{found.shape[1]}; it belongs to another scorer, fit one for this scorer"
            )
        return found


def fit(
    examples: Sequence[Labelled],
    *,
    seed: int = 0,
    by_window: bool = False,
    per_key: bool = True,
    row: Row = "predicting",
    context: Context = "prompt",
    c: float = 0.01,
) -> LookbackHead:
    """Fit both models on labelled answers. `c` is the inverse L2 penalty on standardised ratios.

    Nothing is random: `seed` is there because every head takes one. The reference does not standardise and
    predicts "supported"; here 1 = unsupported. Raises DetectorError where only one class is present.
    """
    spans: list[NDArray[np.float32]] = []
    windows: list[NDArray[np.float32]] = []
    window_labels: list[NDArray[np.bool_]] = []
    for example in examples:
        found = ratios(example.trace, per_key=per_key, row=row, context=context)
        spans.extend(found[members].mean(axis=0) for members in example.sentences)
        width = min(WINDOW_TOKENS, len(found))
        windows.append(sliding_window_view(found, width, axis=0)[::WINDOW_STEP].mean(axis=-1))
        labelled = sliding_window_view(example.token_labels, width)[::WINDOW_STEP]
        window_labels.append(np.asarray(labelled.any(axis=-1)))
    labels = [example.sentence_labels for example in examples]
    return LookbackHead(
        _fit(spans, labels, "sentences", c),
        _fit(windows, window_labels, "windows", c),
        by_window=by_window,
        per_key=per_key,
        row=row,
        context=context,
    )


def from_parts(parts: Mapping[str, Any]) -> LookbackHead:
    """What `to_parts` gave."""

    def model(prefix: str) -> Logistic:
        return Logistic.from_parts({name: parts[prefix + name] for name in ("mean", "sd", "weight", "bias")})

    return LookbackHead(
        model("sentence_"),
        model("window_"),
        by_window=bool(parts["by_window"]),
        per_key=bool(parts["per_key"]),
        row=parts["row"],
        context=parts["context"],
    )


def _fit(
    features: list[NDArray[np.float32]], labels: list[NDArray[np.bool_]], what: str, c: float
) -> Logistic:
    joined = np.concatenate(labels) if labels else np.zeros(0, dtype=bool)
    n_bad = int(joined.sum())
    if n_bad in (0, len(joined)):
        raise DetectorError(
            f"lookback: {n_bad} of {len(joined)} {what} are unsupported; fitting needs some of each, "
            "give it more labelled answers"
        )
    return Logistic.fit(np.vstack(features), joined, c=c)
