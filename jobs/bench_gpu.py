"""The suite for a GPU: models of random weights in the shapes of Qwen2.5, made where they are measured.

A GPU runs records in packs. Beside the usual comparison each case tells what one answer and several answers
take in packs and by the cached walk, and how far apart the numbers are.

Time and memory do not depend on what the weights say. Nothing is fetched: the tokenizer is a list of words,
so a machine with torch, transformers and numpy is enough.
"""

import importlib.util
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from jobs.errors import ConfigError

if TYPE_CHECKING:
    from detector.record import Record
    from detector.scorer import Scorer

SHAPES: dict[str, dict[str, int]] = {
    "qwen2.5-0.5b": {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "vocab_size": 151_936,
    },
    "qwen2.5-1.5b": {
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "vocab_size": 151_936,
    },
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 512,
    },
}
"""Layers and widths as in the published configurations; `tiny` is for a dry run."""

QWEN = ("qwen2.5-0.5b", "qwen2.5-1.5b")

_CONTEXTS, _PASSAGES, _ANSWER = (700, 4000, 8000), (5, 20), 200
_WINDOW = 32_768
_TOGETHER = 4  # answers in one pack, budget permitting


def run_suite(models: Sequence[str], repeats: int, json_file: str | None, say: Callable[[str], None]) -> None:
    """Measure and print every model and case; `json_file` holds what is done so far, a tree per case.

    `tiny` measures no memory and short contexts only. On a GPU with triton the kernel of the vocabulary step
    comes last. Raises ConfigError for an unknown model.
    """
    _without_sentencex()
    from jobs.bench import show, write
    from jobs.bench_cases import Ask, bench, generated
    from jobs.bench_peers import MODES, ScorerSpec
    from jobs.bench_shapes import Shape

    package = "gasp-rag" if importlib.util.find_spec("gasp") else "reference"
    runs: list[dict[str, Any]] = []
    for name in models:
        if name not in SHAPES:
            raise ConfigError(f"--model {name}: unknown; one of {', '.join(SHAPES)}")
        tiny = name == "tiny"
        contexts, passages, answer = ((120,), (2, 3), 40) if tiny else (_CONTEXTS, _PASSAGES, _ANSWER)
        with tempfile.TemporaryDirectory() as folder:
            say(f"{name}: random weights")
            write_random_scorer(Path(folder), name)
            spec = ScorerSpec(folder)
            scorer = spec.load()
            for shape in (Shape(c, answer, k) for c in contexts for k in passages):
                ask = Ask((shape,), MODES, (package, "padded", "separate"), 1, repeats, memory=not tiny)
                found = bench(ask, spec, scorer, [generated(shape, 1, scorer)], say)
                found["scorer"]["name"] = f"{name}, random weights"
                records = generated(shape, 2 if tiny else _TOGETHER, scorer).records
                found["executors"] = compare_executors(scorer, records, repeats, say)
                show(found)
                _show_executors(found["executors"])
                runs.append(found)
                if json_file is not None:
                    write(runs, json_file)
    if torch.cuda.is_available() and importlib.util.find_spec("triton"):
        from jobs import bench_kernel

        bench_kernel.show(bench_kernel.compare(repeats, say))


def compare_executors(
    scorer: "Scorer", records: Sequence["Record"], repeats: int, say: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Per leave-one-out mode: seconds per answer in packs of many, of one, and walked, in turns; the largest
    differences from the walk in nats; and the extra peak bytes of a GPU. The scorer is left as it was.
    """
    from detector.errors import RecordRejected
    from jobs.bench_meters import time_rounds
    from jobs.bench_peers import MODES, keep_of

    device, usual, rows = scorer.model.device, scorer.packed, []
    traces: dict[str, list[Any]] = {}

    def read(name: str, loo: str) -> None:
        scorer.packed, keep = name != "walk", keep_of(loo)
        if name == "packs of many":
            found = scorer.trace_many(records, keep)
            rejected = next((one for one in found if isinstance(one, RecordRejected)), None)
            if rejected is not None:
                raise rejected
            traces[name] = [one[1][0] for one in found if not isinstance(one, RecordRejected)]
        else:
            traces[name] = [scorer.trace(record, keep)[1][0] for record in records]

    try:
        for loo in MODES:
            tasks = {name: partial(read, name, loo) for name in ("walk", "packs of one", "packs of many")}
            peaks = {name: _peak_bytes(task, device) for name, task in tasks.items()}  # compiles, too
            seconds = time_rounds(tasks, repeats, device, lambda text, loo=loo: say(f"{loo}, {text}"))
            rows += [
                {
                    "mode": loo,
                    "executor": name,
                    "n_answers": len(records),
                    "seconds_per_answer": statistics.median(seconds[name]) / len(records),
                    "computed_tokens": sum(trace.n_computed_tokens for trace in traces[name]),
                    "extra_peak_bytes": peaks[name],
                    "off_walk_nats": _furthest(traces[name], traces["walk"]),
                }
                for name in tasks
            ]
    finally:
        scorer.packed = usual
    return rows


def _peak_bytes(task: Callable[[], object], device: torch.device) -> int | None:
    """Of a second run: the first one compiles."""
    task()
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    task()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def _furthest(ours: Sequence[Any], theirs: Sequence[Any]) -> float:
    names = ("logprob", "logprob_no_context", "jsd_no_context", "logprob_without", "jsd_without")
    pairs = [
        (getattr(one, name), getattr(other, name))
        for one, other in zip(ours, theirs, strict=True)
        for name in names
    ]
    return max(float(np.abs(a - b).max(initial=0.0)) for a, b in pairs if a is not None)


def _show_executors(rows: Sequence[dict[str, Any]]) -> None:
    from jobs.bench import show_table

    columns = ("", "", "s/answer", "answers/s", "tokens", "extra peak", "off walk")
    cells = [
        [
            row["mode"],
            row["executor"],
            f"{row['seconds_per_answer']:.3g}",
            f"{1 / row['seconds_per_answer']:.3g}",
            f"{row['computed_tokens']:,}",
            "" if row["extra_peak_bytes"] is None else f"{row['extra_peak_bytes'] / 2**20:,.0f} MiB",
            f"{row['off_walk_nats']:.0e} nats",
        ]
        for row in rows
    ]
    show_table(f"Packs against the cached walk, {rows[0]['n_answers']} answers", columns, cells)


def write_random_scorer(folder: Path, name: str) -> Path:
    """A scorer folder of that shape: safetensors, and a tokenizer of whole words. The same every time."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    from jobs.bench_shapes import WORDS

    shape = SHAPES[name]
    vocabulary = {word: index for index, word in enumerate(("<unk>", ".", "?", ":", *WORDS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    split = [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Punctuation()]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(split)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(folder)
    gpu = torch.cuda.is_available()
    # Not Qwen2Config: by that name transformers would load a tokenizer of Qwen's instead of this one. The
    # layers are the same but for a bias.
    config = LlamaConfig(**shape, max_position_embeddings=_WINDOW, tie_word_embeddings=name != "tiny")
    with torch.random.fork_rng(), torch.device("cuda" if gpu else "cpu"):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).to(torch.bfloat16 if gpu else torch.float32)
    model.save_pretrained(folder)
    return folder


def _without_sentencex() -> None:
    """A bare machine lacks the sentence splitter: there a text is one sentence, which costs nothing here."""
    if importlib.util.find_spec("sentencex") is None:
        stand_in = ModuleType("sentencex")
        whole = lambda _code, text: [{"start_index": 0, "end_index": len(text)}]  # noqa: E731
        stand_in.get_sentence_boundaries = whole  # type: ignore[attr-defined]
        sys.modules["sentencex"] = stand_in
