"""The suite for a GPU: models of random weights in the shapes of Qwen2.5, made where they are measured.

Time and memory do not depend on what the weights say. Nothing is fetched: the tokenizer is a list of words,
so a machine with torch, transformers and numpy is enough.
"""

import importlib.util
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from jobs.errors import ConfigError

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
        "hidden_size": 32,
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


def run_suite(models: Sequence[str], repeats: int, json_file: str | None, say: Callable[[str], None]) -> None:
    """Measure and print every model and case; `json_file` holds what is done so far, a tree per case.

    `tiny` measures no memory and short contexts only. Raises ConfigError for an unknown model.
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
                show(found)
                runs.append(found)
                if json_file is not None:
                    write(runs, json_file)


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
