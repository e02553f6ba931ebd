"""Write a Page as HTML: no request, no clock, no number that is not finite, no text unescaped."""

import math
import re
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from jobs.report.page import Page
from jobs.report.visible import show_controls
from jobs.report.wording import explain_basis, headline, percent


def render(page: Page) -> str:
    """The whole page as one HTML document."""
    environment = Environment(
        autoescape=True,
        finalize=_finalize,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "count": lambda value: f"{value:,}",
        "signed": lambda value: _number(value, "+z.2f"),
        "plain": lambda value: _number(value, "z.2f"),
        "fine": lambda value: _number(value, ".4g"),
        "percent": lambda value: "–" if value is None else percent(value),
        "size": _size,
        "along": lambda share, axis=1.0: f"{100 * share / axis:.2f}%",
    }
    environment.globals |= {"explain_basis": explain_basis, "headline": headline}
    return environment.from_string(_read("template.html")).render(
        page=page, style=Markup(_read("style.css")), script=Markup(_read("script.js"))
    )


def _read(name: str) -> str:
    # Indentation is for whoever reads the sources; repeated for every card it would be a tenth of the page.
    return re.sub(r"\n +", "\n", Path(__file__).with_name(name).read_text(encoding="utf-8"))


def _finalize(value: Any) -> Any:
    """Runs on every expression of the template, before it is escaped."""
    if type(value) is str:
        return show_controls(value)
    if isinstance(value, float):
        raise TypeError("a float reached the page without a format")
    return "" if value is None else value


def _number(value: float | None, form: str) -> str:
    if value is None or not math.isfinite(value):
        return "–"
    return format(value, form).replace("-", "\N{MINUS SIGN}")


def _size(n_bytes: int | None) -> str:
    if n_bytes is None:
        return "–"
    for unit in ("bytes", "kB", "MB"):
        if n_bytes < 1000:
            return f"{n_bytes:.3g} {unit}" if unit != "bytes" else f"{n_bytes} {unit}"
        n_bytes = n_bytes / 1000
    return f"{n_bytes:,.3g} GB"
