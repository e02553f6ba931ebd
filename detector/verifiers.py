"""Verifiers: encoders trained to check text against text, for users who can reach a model hub.

They read a Record, not a Trace, so they are not in the table of methods: baselines that `evaluate` puts
beside it. Two kinds, each with many checkpoints that fit (cross-encoder/nli-..., KRLabsOrg/lettucedect-...):

    NLIVerifier       does a passage entail the sentence? (SummaC, MiniCheck, the GASP paper's baseline)
    TokenClassifier   which tokens of the answer are hallucinated? (LettuceDetect's convention)

Support has union semantics: one passage, chunk or window that supports the text is enough. LettuceDetect
itself takes the largest probability over chunks, so that every chunk must support a token (its issue 74).
Nothing is cut off: what does not fit the window is read in overlapping chunks.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification, AutoTokenizer
from transformers.utils import logging

from detector.errors import RecordRejected, RejectReason, ScorerError
from detector.identity import ScorerInfo, fingerprint, locate, no_model, place
from detector.prefix_tree import Ids
from detector.prompts import encode
from detector.record import Record
from detector.sentences import Span
from detector.trace import F32, I32
from detector.windows import MIN_CONTEXT_TOKENS, cut_segments, group_pieces

HALLUCINATED = 1
"""The label of an unsupported token (LettuceDetect; its checkpoints call it LABEL_1)."""
TRAINED_TOKENS = 4096
"""LettuceDetect's checkpoints were trained up to here, whatever their configuration allows."""
_BATCH_TOKENS = 1 << 14


@dataclass(frozen=True, slots=True)
class _Pair:
    """Ids of two texts; what is looked at are the second text's last `n_rows` tokens, or the pair (0)."""

    first: Ids
    second: Ids
    n_rows: int = 0


@dataclass(frozen=True, slots=True)
class _Encoder:
    """A model with its tokenizer, and the marks that it wants around a pair of texts."""

    model: Any
    tokenizer: Any
    info: ScorerInfo
    marks: tuple[Ids, Ids, Ids]
    """Before, between and after the two texts."""
    types: tuple[int, ...]
    """Segment type of each of the five parts: marks, text, marks, text, marks."""

    @property
    def room(self) -> int:
        """Tokens of text that fit the window."""
        return self.info.window_tokens - sum(len(mark) for mark in self.marks)

    def encode(self, text: str) -> tuple[Ids, tuple[Span, ...]]:
        """Ids and code-point offsets; no id of a control token, whatever the text says."""
        ids, offsets = encode(self.tokenizer, text)
        # A unigram vocabulary holds its control tokens as ordinary pieces and finds them in plain text.
        control = set(self.tokenizer.all_special_ids)
        if control.isdisjoint(ids):
            return ids, offsets
        unknown = self.tokenizer.unk_token_id
        kept = [(unknown if i in control else i, o) for i, o in zip(ids, offsets, strict=True)]
        kept = [(i, o) for i, o in kept if i is not None]
        return tuple(i for i, _ in kept), tuple(o for _, o in kept)

    def probabilities(self, pairs: Sequence[_Pair], label: int) -> list[F32]:
        """P(label) of each pair: (n_rows,), or (1,) for a pair as a whole. Raises RecordRejected."""
        found: dict[int, F32] = {}
        batch: list[int] = []
        # By length, so that little is padded; pairs of one record only, so that no other can change a number.
        for index in sorted(range(len(pairs)), key=lambda i: self._length(pairs[i])):
            if batch and (len(batch) + 1) * self._length(pairs[index]) > _BATCH_TOKENS:
                found |= self._run(pairs, batch, label)
                batch = []
            batch.append(index)
        if batch:
            found |= self._run(pairs, batch, label)
        if not all(np.isfinite(values).all() for values in found.values()):
            detail = f"the verifier gave non-finite numbers in {self.info.dtype}"
            raise RecordRejected(RejectReason.SCORING_FAILED, detail)
        return [found[index] for index in range(len(pairs))]

    def _length(self, pair: _Pair) -> int:
        return len(pair.first) + len(pair.second) + sum(len(mark) for mark in self.marks)

    def _run(self, pairs: Sequence[_Pair], batch: list[int], label: int) -> dict[int, F32]:
        width = max(self._length(pairs[index]) for index in batch)
        ids = torch.full((len(batch), width), self.tokenizer.pad_token_id or 0)
        mask, types = torch.zeros_like(ids), torch.zeros_like(ids)
        for row, index in enumerate(batch):
            pair, (before, between, after) = pairs[index], self.marks
            parts = (before, pair.first, between, pair.second, after)
            kinds = [kind for kind, part in zip(self.types, parts, strict=True) for _ in part]
            stop = self._length(pair)
            ids[row, :stop] = torch.tensor([token for part in parts for token in part])
            types[row, :stop] = torch.tensor(kinds)
            mask[row, :stop] = 1
        given = {"input_ids": ids, "attention_mask": mask}
        taken = inspect.signature(self.model.forward).parameters
        if "token_type_ids" in taken and "token_type_ids" in self.tokenizer.model_input_names:
            given["token_type_ids"] = types
        with torch.inference_mode():
            logits: Tensor = self.model(**{n: t.to(self.model.device) for n, t in given.items()}).logits
            chances = logits.float().softmax(dim=-1)[..., label].cpu().numpy()
        found = {}
        for row, index in enumerate(batch):
            pair, stop = pairs[index], self._length(pairs[index]) - len(self.marks[2])
            found[index] = chances[row, stop - pair.n_rows : stop] if pair.n_rows else chances[row, None]
        return found


class NLIVerifier:
    """A cross-encoder for natural language inference: how likely does a passage entail a sentence?"""

    def __init__(self, encoder: _Encoder, entailment: int) -> None:
        self.info = encoder.info
        self._encoder = encoder
        self._entailment = entailment

    @classmethod
    def load(
        cls,
        name_or_path: str | Path,
        *,
        device: str = "auto",
        dtype: str = "auto",
        max_tokens: int | None = None,
    ) -> "NLIVerifier":
        """Load a hub id or a local folder with safetensors and a fast tokenizer; no code of its own is run.

        `max_tokens` bounds sentence and passage chunk together (default: what the model was made for).
        Raises ScorerError, also where the configuration names no label `entailment`.
        """
        encoder = _load(AutoModelForSequenceClassification, str(name_or_path), device, dtype, max_tokens)
        labels = encoder.model.config.id2label
        entailment = [int(i) for i, label in labels.items() if str(label).strip().lower() == "entailment"]
        if len(entailment) != 1 or len(labels) < 2:
            raise ScorerError(
                f"scorer {name_or_path}: its labels ({', '.join(map(str, labels.values()))}) do not hold one "
                "called entailment, so not an NLI model; pass another, or name the labels in config.json"
            )
        return cls(encoder, entailment[0])

    def sentences(self, record: Record, spans: Sequence[Span]) -> F32:
        """(n,) 1 - the largest P(entailment) over passages and their chunks, in [0, 1] (see `evidence`)."""
        return self.evidence(record, spans)[0]

    def evidence(self, record: Record, spans: Sequence[Span]) -> tuple[F32, I32]:
        """(n,) scores in [0, 1], higher = less grounded, and (n,) the passage that entails each span most.

        A sentence of more than half the window is read in parts that must all be entailed, by any passages;
        its evidence is that of the weakest part. A span that the tokenizer reads nothing in scores 1 and has
        evidence -1. Raises RecordRejected (no_passages, missing_answer, scoring_failed).
        """
        _check(record)
        room = self._encoder.room
        passages = [self._encoder.encode(p.text)[0] if p.text.strip() else () for p in record.passages]
        pairs: list[_Pair] = []
        where: list[tuple[int, int]] = []  # part, passage
        parts: list[int] = []  # the span of each part
        for span, (start, end) in enumerate(spans):
            for part in _chunks(self._encoder.encode(record.answer[start:end])[0], room // 2):
                for index, ids in enumerate(passages):
                    for chunk in _chunks(ids, room - len(part)):
                        pairs.append(_Pair(chunk, part))
                        where.append((len(parts), index))
                parts.append(span)
        support = np.full((len(parts), len(passages)), -1, dtype=np.float32)
        chances = self._encoder.probabilities(pairs, self._entailment)
        for cell, (chance,) in zip(where, chances, strict=True):
            support[cell] = max(support[cell], chance)
        scores = np.ones(len(spans), dtype=np.float32)
        best = np.full(len(spans), -1, dtype=np.int32)
        owner, strongest = np.asarray(parts, dtype=np.int64), support.max(axis=1, initial=-1)
        for span in range(len(spans)):
            own = np.flatnonzero(owner == span)
            if len(own) and strongest[own].max() >= 0:
                weakest = own[strongest[own].argmin()]
                scores[span], best[span] = 1 - strongest[weakest], support[weakest].argmax()
        return scores, best


class TokenClassifier:
    """An encoder that marks the hallucinated tokens of an answer (LettuceDetect and what is trained like it).

    The prompt follows LettuceDetect's order and frame (`passage i:`, `output:`), not its every word.
    """

    def __init__(self, encoder: _Encoder) -> None:
        self.info = encoder.info
        self._encoder = encoder

    @classmethod
    def load(
        cls,
        name_or_path: str | Path,
        *,
        device: str = "auto",
        dtype: str = "auto",
        max_tokens: int | None = None,
    ) -> "TokenClassifier":
        """Load a hub id or a local folder with safetensors and a fast tokenizer; no code of its own is run.

        `max_tokens` bounds prompt and answer together (default: what the model was made for, 4,096 at most).
        Raises ScorerError, also where the model does not have exactly two labels.
        """
        encoder = _load(AutoModelForTokenClassification, str(name_or_path), device, dtype, max_tokens)
        if encoder.model.config.num_labels != 2:
            raise ScorerError(
                f"scorer {name_or_path}: {encoder.model.config.num_labels} labels a token, expected 2 "
                "(supported, hallucinated); pass a model that was trained like LettuceDetect's"
            )
        if max_tokens is None:
            window = min(encoder.info.window_tokens, TRAINED_TOKENS)
            encoder = replace(encoder, info=replace(encoder.info, window_tokens=window))
        return cls(encoder)

    def tokens(self, record: Record) -> tuple[I32, F32]:
        """(T, 2) code points into the answer and (T,) P(hallucinated), on the verifier's own tokens.

        Passages that do not fit together are read in several windows, and a token takes its smallest
        probability: one window that supports it is enough. A long answer is read in overlapping segments.
        Raises RecordRejected (no_passages, missing_answer, answer_too_short, over_window, scoring_failed).
        """
        _check(record)
        ids, offsets = self._encoder.encode(record.answer)
        if not ids:
            raise RecordRejected(RejectReason.ANSWER_TOO_SHORT, "0 tokens, 1 needed")
        head = self._encoder.encode(_heading(record.question))[0]
        tail = self._encoder.encode("output:")[0]
        segments, room = cut_segments(len(ids), self._encoder.room - len(head) - len(tail))
        texts = [
            f"passage {number}: {passage.text}\n"
            for number, passage in enumerate(record.passages, start=1)
            if passage.text.strip()
        ]
        pieces = [chunk for text in texts for chunk in _chunks(self._encoder.encode(text)[0], room)]
        windows = group_pieces([len(piece) for piece in pieces], room)
        prompts = [head + tuple(t for i in window for t in pieces[i]) + tail for window in windows]
        pairs = [
            _Pair(prompt, ids[segment.tail : segment.stop], segment.stop - segment.start)
            for prompt in prompts
            for segment in segments
        ]
        read = np.concatenate(self._encoder.probabilities(pairs, HALLUCINATED)).reshape(len(prompts), -1)
        return np.asarray(offsets, dtype=np.int32).reshape(-1, 2), read.min(axis=0)

    def sentences(self, record: Record, spans: Sequence[Span]) -> F32:
        """(n,) the largest P(hallucinated) over the tokens that share a character with each span.

        A span that the tokenizer reads nothing in scores 1. Raises RecordRejected.
        """
        offsets, chances = self.tokens(record)
        bounds = np.asarray(spans, dtype=np.int32).reshape(-1, 2)
        inside = (offsets[:, 0] < bounds[:, 1, None]) & (offsets[:, 1] > bounds[:, 0, None])
        largest = np.where(inside, chances, 0).max(axis=1, initial=0)
        return np.asarray(np.where(inside.any(axis=1), largest, 1), dtype=np.float32)


def _heading(question: str) -> str:
    if not question.strip():
        return "Summarize the following text:\n"
    return f"Briefly answer the following question:\n{question}\nUse nothing but these passages:\n"


def _chunks(ids: Ids, room: int) -> list[Ids]:
    """Chunks of at most `room` tokens; neighbours share a quarter, so a fact on a cut is whole in one."""
    if not ids:
        return []
    step = max(1, room - room // 4)
    n_chunks = 1 + max(0, -(-(len(ids) - room) // step))
    return [ids[i * step : i * step + room] for i in range(n_chunks)]


def _check(record: Record) -> None:
    if not any(passage.text.strip() for passage in record.passages):
        reason = RejectReason.PASSAGE_TEXT_MISSING if record.passages else RejectReason.NO_PASSAGES
        raise RecordRejected(reason, f"{len(record.passages)} passages, none with text")
    if not record.answer.strip():
        raise RecordRejected(RejectReason.MISSING_ANSWER, "the answer is empty or white space")


def _load(kind: Any, name: str, device: str, dtype: str, max_tokens: int | None) -> _Encoder:
    """Raises ScorerError for what is not a safetensors encoder with a trained head and a fast tokenizer."""
    info = fingerprint(name, device=device, dtype=dtype, window_tokens=max_tokens)
    source = locate(name, None)
    logging.disable_progress_bar()
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
        model, report = kind.from_pretrained(
            source,
            dtype=getattr(torch, info.dtype),
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise ScorerError(no_model(name, error)) from None
    if report["missing_keys"]:
        # transformers would fill them with random numbers, which score as readily as trained ones.
        missing = sorted(report["missing_keys"])
        raise ScorerError(
            f"scorer {name}: {len(missing)} weights are not in its files ({missing[0]}, ...), so it was not "
            "trained for this task; pass a checkpoint that was"
        )
    if not tokenizer.is_fast:
        raise ScorerError(f"scorer {name}: its tokenizer gives no offsets (it is not a fast tokenizer)")
    info = replace(info, window_tokens=_positions(model, info.window_tokens))
    marks, types = _pair_format(tokenizer)
    encoder = _Encoder(model.to(place(device, dtype)[0]).eval(), tokenizer, info, marks, types)
    if encoder.room < 2 * MIN_CONTEXT_TOKENS:
        raise ScorerError(
            f"scorer {name}: a window of {info.window_tokens} tokens leaves {encoder.room} for text; raise "
            "max_tokens or pass a model that reads more"
        )
    return encoder


def _positions(model: Any, most: int) -> int:
    """RoBERTa counts positions from its padding index on, so that two of its 514 are never used."""
    for module in model.modules():
        table = getattr(module, "position_embeddings", None)
        if isinstance(table, torch.nn.Embedding) and table.padding_idx is not None:
            return min(most, table.num_embeddings - table.padding_idx - 1)
    return most


def _pair_format(tokenizer: Any) -> tuple[tuple[Ids, Ids, Ids], tuple[int, ...]]:
    """`marks` and `types` of an _Encoder, read off a pair that this tokenizer wrote."""
    written = tokenizer("a", "b", return_token_type_ids=True)
    owners, ids, types = written.sequence_ids(0), written["input_ids"], written["token_type_ids"]
    first, second = owners.index(0), owners.index(1)
    cuts = (0, first, first + owners.count(0), second, second + owners.count(1), len(ids))
    before, _, between, _, after = (tuple(ids[start:stop]) for start, stop in pairwise(cuts))
    return (before, between, after), tuple(types[i] if i < stop else 0 for i, stop in pairwise(cuts))
