"""Tiny random models of several families over the tiny scorer's tokenizer, and what `eager` attends to."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    AutoTokenizer,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from detector import Scorer, attention
from detector.identity import ScorerInfo
from detector.prompts import PROFILES
from detector.record import Record

RECORD = Record(
    question="Who built the bridge?",
    passages=["Ada built the bridge in 1891.", "It was painted green.", "Tolls ended in 1950."],
    answer="Ada built it in 1891. It has been green since.",
)

# Wide initialisation: with the usual 0.02 attention is nearly uniform and a wrong row would hardly show.
_COMMON = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "max_position_embeddings": 2048,
    "initializer_range": 0.3,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}

FAMILIES: dict[str, Any] = {
    "llama": (LlamaForCausalLM, LlamaConfig, {"num_key_value_heads": 4}),
    "llama with shared keys": (LlamaForCausalLM, LlamaConfig, {"num_key_value_heads": 2}),
    "mistral, sliding window": (
        MistralForCausalLM,
        MistralConfig,
        {"num_key_value_heads": 1, "sliding_window": 60},
    ),
    "gemma 3, mixed layers": (
        Gemma3ForCausalLM,
        Gemma3TextConfig,
        {
            "num_key_value_heads": 2,
            "head_dim": 8,
            "query_pre_attn_scalar": 24,
            "sliding_window": 60,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "qwen 2": (Qwen2ForCausalLM, Qwen2Config, {"num_key_value_heads": 2}),
}


def make_model(family: str, n_layers: int = 3, dtype: torch.dtype = torch.float32) -> Any:
    """A random model of this family, always the same one."""
    model_class, config_class, settings = FAMILIES[family]
    config = config_class(vocab_size=512, num_hidden_layers=n_layers, **_COMMON, **settings)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return model_class(config).to(dtype).eval()


def make_scorer(
    folder: Path, family: str = "llama", *, profile: str = "plain", window_tokens: int = 2048, **settings: Any
) -> Scorer:
    """A scorer around such a model, with the attention that `Scorer.load` would give it."""
    model = make_model(family, **settings)
    attention.register()
    model.set_attn_implementation(attention.NAME)
    info = ScorerInfo("tiny", "0" * 12, window_tokens, str(model.dtype).removeprefix("torch."), True)
    return Scorer(model, AutoTokenizer.from_pretrained(folder), info, PROFILES[profile])


@torch.inference_mode()
def read_eagerly(scorer: Scorer, ids: tuple[int, ...]) -> tuple[np.ndarray, dict[int, np.ndarray]]:
    """One plain pass without a cache: attention maps (L, H, T, T), and states (T, D) per layer."""
    model = copy.deepcopy(scorer.model)
    model.set_attn_implementation("eager")
    body, before_norm = model.base_model, []
    body.layers[-1].register_forward_hook(
        lambda _module, _args, out: before_norm.append(out[0] if isinstance(out, tuple) else out)
    )
    out = body(
        input_ids=torch.tensor([ids]), use_cache=False, output_attentions=True, output_hidden_states=True
    )
    maps = torch.cat(out.attentions).numpy()
    n_layers = len(out.attentions)
    # transformers puts the last block's output behind the final norm: one entry less than is wanted here.
    states = [*out.hidden_states[1:n_layers], before_norm[0], out.hidden_states[n_layers]]
    return maps, {layer: state[0].numpy() for layer, state in enumerate(states, start=1)}
