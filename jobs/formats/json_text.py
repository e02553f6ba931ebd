"""JSON as it is found in logs: NaN, absurd numbers, bottomless nesting, JSON inside strings."""

import ast
import io
import json
import re
import tokenize
import warnings
from typing import Any

BOM = b"\xef\xbb\xbf"

# Python's own literals build a syntax tree of some 300 bytes a node, so both sizes are bounded.
_LITERAL_CHARS = 1 << 20
_LITERAL_COMMAS = 50_000
_SIDE_BY_SIDE = re.compile(r"""['"}\]]\s+[bru]?['"{\[]""")


def loads(data: bytes) -> Any:
    """Parse UTF-8 JSON, with or without BOM; NaN and infinities become None.

    Raises ValueError with one line that names the place and holds no log text.
    """
    try:
        text = data.removeprefix(BOM).decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 (byte {error.start})") from None
    return _parse(text)


def embedded(text: str) -> Any:
    """The list, object or string that `text` holds as JSON, else None.

    Lists and objects written by Python's `repr` count too, and NumPy's arrays, which stand without commas:
    that is what data frames leave in CSV cells.
    """
    stripped = text.strip()
    if not stripped or stripped[0] + stripped[-1] not in ("[]", "{}", '""'):
        return None
    try:
        return _parse(stripped)
    except ValueError:
        return _literal(stripped)


def _parse(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=lambda _: None)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error.msg} at character {error.pos})") from None
    except RecursionError:
        raise ValueError("JSON nested too deeply") from None
    except ValueError:  # Python refuses to convert integers of more than 4,300 digits
        raise ValueError("a number in the JSON has too many digits") from None


def _literal(text: str) -> Any:
    if len(text) > _LITERAL_CHARS or text.count(",") > _LITERAL_COMMAS:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in log text are not our code's fault
            value = ast.literal_eval(_separated(text) if _SIDE_BY_SIDE.search(text) else text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError, tokenize.TokenError):
        return None
    return value if isinstance(value, (list, dict)) else None


def _separated(text: str) -> str:
    """The same with a comma between two items where there is none. Python would join two strings into one.

    Raises SyntaxError or TokenError for what is no Python.
    """
    pieces: list[str] = []
    ended = False
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in (tokenize.NL, tokenize.NEWLINE, tokenize.ENDMARKER):
            continue
        if ended and (token.type == tokenize.STRING or token.string in ("[", "{")):
            pieces.append(",")
        pieces.append(token.string)
        ended = token.type == tokenize.STRING or token.string in ("]", "}")
    return " ".join(pieces)
