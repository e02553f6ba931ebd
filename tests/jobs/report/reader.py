"""The page as a browser would read it, for the tests of the page."""

import re
from html.parser import HTMLParser
from pathlib import Path

from jobs.report import write_report
from jobs.storage import Storage
from tests.jobs.report.fake_run import Answer, Said, write_fake_run

PROSE = "The committee agreed that the logistics programme needs a second round of funding. "
VOID = {"meta", "link", "img", "br", "line", "rect", "circle", "path"}


class Reader(HTMLParser):
    """What a browser would make of the page: tags with attributes, and the text inside each class or id."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str]]] = []
        self._text: list[str] = []
        self._inside: dict[str, list[list[str]]] = {}
        self._open: list[tuple[str, list[str]]] = []
        self.feed(html)
        self.text = "".join(self._text)
        self.inside = {name: ["".join(data) for data in found] for name, found in self._inside.items()}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.tags.append((tag, found))
        names = [tag, *found.get("class", "").split(), *([f"#{found['id']}"] if "id" in found else [])]
        if tag not in VOID:
            self._open.append((tag, names))
            for name in names:
                self._inside.setdefault(name, []).append([])

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self._open.pop()[0] == tag, f"</{tag}> closes another element"

    def handle_data(self, data: str) -> None:
        if any(tag in ("script", "style") for tag, _ in self._open):
            return
        self._text.append(data)
        for name in {name for _, names in self._open for name in names}:
            self._inside[name][-1].append(data)

    @property
    def words(self) -> str:
        return re.sub(r"\s+", " ", self.text)


def read_page(out: Path, *arguments: object, **settings: object) -> Reader:
    """Write a fake run and read its page."""
    config = write_fake_run(str(out), *arguments, **settings)
    return Reader(Path(write_report(str(out), Storage(), config)).read_text())


def flat(score: float, response_id: str, **rest: object) -> Answer:
    return Answer([Said(f"Sentence of {response_id}.", score)], response_id=response_id, **rest)
