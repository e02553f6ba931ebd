"""The parts of a trained head as files: a tree of arrays, LightGBM models, numbers and short texts.

Arrays go into one safetensors file under their dotted names, each LightGBM model into a text of its own, and
the rest stays in a JSON tree, where an array is shown as ["array", dtype, shape] and a model as ["lightgbm"].
File names follow from the tree, so a tree from elsewhere cannot point anywhere else.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detector.errors import ProfileError

ARRAYS, TREES = "arrays.safetensors", ".lightgbm.txt"
"""The file of all arrays, and how the file of a LightGBM model ends."""

Parts = Mapping[str, Any]

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}", re.ASCII)
_MAX_DEPTH = 8
_STORED = {"float32": "float32", "float64": "float32", "int64": "int64", "bool": "bool"}
"""dtype of a head's array -> dtype on disk."""


def settle(parts: Any) -> dict[str, Any]:
    """A copy of a tree of parts as it will be after it was stored: floats rounded to float32, integers int64.

    A floating-point array keeps its dtype. Raises ProfileError for what cannot be stored: a name that is no
    word, a number that is not finite, an object of another kind.
    """
    _check_names(parts, "parts")
    return _settled(parts, "parts")


def to_tree(parts: Parts) -> dict[str, Any]:
    """What the JSON tree shows of settled parts."""
    shown: dict[str, Any] = {}
    for key, value in parts.items():
        if isinstance(value, Mapping):
            shown[key] = to_tree(value)
        elif isinstance(value, np.ndarray):
            shown[key] = ["array", str(value.dtype), list(value.shape)]
        else:
            shown[key] = ["lightgbm"] if _is_model(value) else value
    return shown


def to_files(parts: Parts) -> dict[str, bytes]:
    """The other files of settled parts by name; the same parts give the same bytes."""
    from safetensors.numpy import save

    leaves = dict(sorted(_leaves(parts)))
    files = {f"{name}{TREES}": leaf.encode() for name, leaf in leaves.items() if _is_model(leaf)}
    arrays = {name: _stored(leaf) for name, leaf in leaves.items() if isinstance(leaf, np.ndarray)}
    return files | ({ARRAYS: save(arrays)} if arrays else {})


def from_tree(tree: Any, read: Callable[[str], bytes]) -> dict[str, Any]:
    """The parts that `to_tree` showed; `read` gives the bytes of a file or raises OSError.

    Raises ProfileError for a tree or a file that `to_tree` and `to_files` did not write.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load

    _check_names(tree, "parts")  # before any of them becomes the name of a file
    arrays: Mapping[str, NDArray[Any]] = {}
    if any(isinstance(leaf, list) and leaf[:1] == ["array"] for _, leaf in _leaves(tree)):
        try:
            arrays = load(read(ARRAYS))
        except (SafetensorError, KeyError, TypeError, ValueError, AttributeError):
            raise ProfileError(f"{ARRAYS} is not a safetensors file of numpy arrays") from None
    return _assembled(tree, arrays, read, "")


def _assembled(
    tree: Parts, arrays: Mapping[str, NDArray[Any]], read: Callable[[str], bytes], prefix: str
) -> dict[str, Any]:
    parts: dict[str, Any] = {}
    for key, entry in tree.items():
        name = f"{prefix}{key}"
        if isinstance(entry, dict):
            parts[key] = _assembled(entry, arrays, read, f"{name}.")
        elif entry == ["lightgbm"]:
            parts[key] = _model(read(name + TREES), name)
        elif isinstance(entry, list):
            parts[key] = _array(entry, arrays.get(name), name)
        else:
            parts[key] = entry
    return parts


def _model(data: bytes, name: str) -> str:
    text = data.decode(errors="replace")
    if not _is_model(text):
        raise ProfileError(f"{name}{TREES} is not a LightGBM model")
    return text


def _array(entry: list[Any], array: NDArray[Any] | None, name: str) -> NDArray[Any]:
    match entry:
        case ["array", str(dtype), list(shape)] if dtype in _STORED:
            if array is None:
                raise ProfileError(f"part {name}: no such array in {ARRAYS}")
            if array.dtype != _STORED[dtype] or list(array.shape) != shape:
                raise ProfileError(f"part {name}: {array.dtype}{list(array.shape)}, not {dtype}{shape}")
            return array.astype(dtype)
    raise ProfileError(f"part {name}: neither an object, a text, a number nor an array")


def _check_names(parts: Any, where: str, depth: int = 0) -> None:
    if not isinstance(parts, Mapping) or depth > _MAX_DEPTH:
        raise ProfileError(f"{where[:80]} must be names and parts, nested {_MAX_DEPTH} deep at most")
    for key, value in parts.items():
        if not isinstance(key, str) or not _NAME.fullmatch(key):
            raise ProfileError(
                f"{where}: parts are named with letters, digits, - and _, not {str(key)[:40]!r}"
            )
        if isinstance(value, Mapping):
            _check_names(value, f"{where}.{key}", depth + 1)


def _settled(parts: Parts, where: str) -> dict[str, Any]:
    settled: dict[str, Any] = {}
    for key, value in parts.items():
        name = f"{where}.{key}"
        if isinstance(value, Mapping):
            settled[key] = _settled(value, name)
        elif isinstance(value, np.ndarray):
            settled[key] = _settled_array(value, name)
        elif isinstance(value, (bool, np.bool_)):
            settled[key] = bool(value)
        elif isinstance(value, (int, float, np.integer, np.floating)):
            settled[key] = value.item() if isinstance(value, np.generic) else value
            if not -math.inf < settled[key] < math.inf:
                raise ProfileError(f"{name} is not a finite number")
        elif isinstance(value, str):
            settled[key] = value
        else:
            raise ProfileError(f"{name}: a {type(value).__name__} cannot be stored")
    return settled


def _settled_array(array: NDArray[Any], name: str) -> NDArray[Any]:
    if array.dtype.kind in "iu":
        return np.array(array, dtype=np.int64, order="C")
    if str(array.dtype) not in _STORED:
        raise ProfileError(f"{name}: an array of {array.dtype} cannot be stored")
    with np.errstate(over="ignore"):
        rounded = _stored(array)
    if not np.isfinite(rounded).all():
        raise ProfileError(f"{name} holds numbers that are not finite in float32")
    return rounded.astype(array.dtype)


def _stored(array: NDArray[Any]) -> NDArray[Any]:
    return np.array(array, dtype=_STORED[str(array.dtype)], order="C")


def _leaves(tree: Parts, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _is_model(value: Any) -> bool:
    return isinstance(value, str) and value.startswith("tree\n")
