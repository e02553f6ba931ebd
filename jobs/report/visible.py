"""Make visible what log text could hide: control characters, direction overrides, tag characters."""

import re

# Kept: tab, line feed, and the joiners and marks that Persian, Indic scripts and emoji need. Shown: other
# controls, the embeddings, overrides and isolates that reorder what follows them, zero-width blanks, and the
# tag block (text that a model reads and a person does not see).
_HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b\u202a-\u202e\u2060\u2066-\u2069\ufeff\ufff9-\ufffb\U000e0000-\U000e007f]"
)


def show_controls(text: str) -> str:
    """Write each hidden character as ⟨U+202E⟩. White space and every visible character stay as they are.

    >>> show_controls("pay \\u202e001")
    'pay ⟨U+202E⟩001'
    """
    return _HIDDEN.sub(lambda match: f"⟨U+{ord(match[0]):04X}⟩", text.replace("\r\n", "\n"))
