"""No log text can turn the page against its reader."""

import re
from pathlib import Path

from jobs.report.cards import anchor
from jobs.report.visible import show_controls
from tests.jobs.report.fake_run import Answer, Reject, Said
from tests.jobs.report.reader import Reader, read_page

HOSTILE = "\"><script>alert(1)</script><img src=x onerror=alert(2)>{{ 7 * 7 }}</style>'&amp;"


def hostile_run(out: Path) -> Reader:
    dimensions = dict.fromkeys(("app", "model", "retriever", "prompt_version", "language"), HOSTILE)
    passage = {"id": HOSTILE, "text": HOSTILE, "source": HOSTILE, "score": 0.5}
    answer = Answer(
        [Said(HOSTILE, 3.0, 0), Said(HOSTILE, 1.0)],
        [passage],
        HOSTILE,
        HOSTILE,
        HOSTILE,
        dimensions=dimensions,
    )
    rejects = [Reject("malformed_row", HOSTILE, HOSTILE, 1, HOSTILE, dimensions)]
    files = [{"url": HOSTILE, "size": 0, "etag": HOSTILE, "format": HOSTILE, "compression": HOSTILE}]
    return read_page(out, [answer], rejects, files=files, settings={"report": {"title": HOSTILE}})


def test_log_text_never_becomes_markup(tmp_path: Path) -> None:
    page = hostile_run(tmp_path)
    names = [tag for tag, _ in page.tags]
    assert names.count("script") == 1 and names.count("style") == 1 and "img" not in names
    assert not [name for _, found in page.tags for name in found if name.startswith("on")]
    assert page.inside["answer"][-1].count(HOSTILE) == 2
    assert page.inside["h3"].count(HOSTILE) == 1
    assert page.text.count(HOSTILE) >= 14


def test_no_request_leaves_the_page(tmp_path: Path) -> None:
    link = "See https://example.com/a.png and //example.com/b.js"
    answers = [Answer([Said(link, 3.0, 0)], [link], link, "https://example.com/id")]
    page = read_page(tmp_path, answers, [Reject("malformed_row", link, "https://example.com/log.jsonl")])
    for _, found in page.tags:
        for name in ("href", "src", "srcset", "action", "data", "poster", "xlink:href", "style"):
            assert found.get(name, "#").startswith(("#", "data:,")), found
    policies = [found["content"] for tag, found in page.tags if "http-equiv" in found]
    assert policies == [
        "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
    ]
    html = (tmp_path / "report" / "index.html").read_text()
    style = html[html.index("<style>") : html.index("</style>")]
    assert "url(" not in style and "@import" not in style


def test_control_and_direction_characters_are_seen(tmp_path: Path) -> None:
    text = "pay \u202e001$\u202c \x1b[31mred\x00 \u200bhidden\U000e0041 \ufeff"
    page = read_page(tmp_path, [Answer([Said(text, 3.0, 0)], [text], text, text)])
    html = (tmp_path / "report" / "index.html").read_text()
    assert not re.search(
        "[\x00-\x08\x0b-\x1f\x7f\u200b\u202a-\u202e\u2066-\u2069\ufeff\U000e0000-\U000e007f]", html
    )
    assert page.inside["answer"][-1].startswith("pay ⟨U+202E⟩001$⟨U+202C⟩ ⟨U+001B⟩[31mred⟨U+0000⟩")


def test_joiners_and_line_breaks_are_kept() -> None:
    assert show_controls("می‌خواهم 👩‍💻\r\n\tb") == "می‌خواهم 👩‍💻\n\tb"


def test_anchor_cannot_be_shaped_by_an_id() -> None:
    assert re.fullmatch(r"r[0-9a-f]{10}", anchor(HOSTILE))
    assert anchor("a") != anchor("b")
