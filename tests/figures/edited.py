"""Two labelled sets made by editing grounded RAGTruth answers: which methods notice?

    python -m tests.figures.edited [--seed 0]

`swapped`: the passages are those of another question, so that nothing of the answer is supported. `changed`:
one number, name or date is another. Beside every edited example stands its twin, the same record before the
edit. Labels are known without annotators, and topic, length and writer are equal in both classes: what only
knows how an unsupported answer looks cannot tell them apart.

The same seed gives the same set, and a smaller set is the beginning of a larger one.
"""

import argparse
import random
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from detector import Record
from detector.sentences import split_sentences
from tests.figures.ragtruth import PATH, Labelled, load

# True whatever the passages say, or truer without them: no answer to swap passages under.
_REFUSAL = re.compile(
    r"unable to|cannot (?:be|answer|determine|provide)|(?:do|does) not |(?:no|not|n't) (?:\w+ ){0,2}"
    r"(?:information|mention|provide|specif|state|clear|contain)",
    re.IGNORECASE,
)
_MONTHS = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October",
    "November", "December",
)  # fmt: skip
_MONTH = "|".join(_MONTHS)
_DATE = re.compile(
    rf"\b(?:{_MONTH}) [1-3]?\d\b|\b[1-3]?\d (?:{_MONTH})\b|(?:(?<= in )|(?<= to )|(?<= since ))(?:{_MONTH})\b"
)
# Two digits or more: a single one stands in most passages somewhere. Not a part of a range, time or code.
_NUMBER = re.compile(r"(?<![\w.,:/–-])(?:[1-9]\d{0,2}(?:,\d{3})+|[1-9]\d+)(?:\.\d+)?(?![\w:/–-]|[.,]\d)")
# Names that stand in these answers, by what may take their place; patterns alone take "Your Name" for one.
_NAMES = (
    ("Alton Brown", "Barbara Windsor", "Donald Trump", "Dred Scott", "Guy Churchwell", "Jim Dale",
     "Kyle Busch", "Julian Holloway", "June Whitfield", "Lamar Odom", "Leslie Phillips", "Mary Fallin",
     "Matt Kenseth", "Mike Markkula", "Richard Carlson", "Ronald Wayne", "Steve Jobs", "Steve Wozniak",
     "Valerie Leon"),
    ("Atlantic City", "Big Bear City", "Clearwater Beach", "Las Vegas", "Long Beach", "Los Gatos",
     "Morro Bay", "New Jersey", "New York City", "Panama City Beach", "Rhode Island", "San Francisco",
     "San Luis Obispo", "Wisconsin Dells", "Koh Samui", "Koh Tao", "Mount Charleston", "Mount Washington"),
    ("Soviet Union", "United Kingdom", "United States", "Canary Islands"),
    ("East Germany", "South Africa", "West Berlin", "West Germany", "Ancient Greece"),
    ("Cook County", "Lake County", "Louis County", "Seminole County", "Westchester County"),
    ("Antarctic Ocean", "East China Sea", "Fremont River", "Great Lakes", "Mississippi Valley",
     "Ohio Valley", "Southern Ocean", "Yangtze River"),
    ("Berlin Airlift", "Berlin Blockade", "Blackhawk War", "Civil War", "French Revolution",
     "Industrial Revolution"),
    ("Ford Ranger", "Honda Accord", "Jeep Wrangler", "Nissan Pathfinder"),
    ("Adobe Reader", "Microsoft Exchange", "Microsoft Windows", "Outlook Express", "Windows Explorer",
     "Windows Live Hotmail", "Windows Vista"),
    ("Google Pixel", "Kindle Paperwhite", "Kindle Voyage", "Samsung Galaxy"),
    ("Salmonella Enteritidis", "Salmonella Typhimurium"),
    ("American Cancer Society", "Cancer Council Victoria", "Copyright Office",
     "Social Security Administration", "Supreme Court", "War Department"),
    ("Circus Circus Hotel", "Excalibur Hotel", "Luxor Hotel", "Monte Carlo Resort",
     "Stratosphere Casino Hotel"),
)  # fmt: skip
_GROUP = {name: group for group in _NAMES for name in group}
# Not in quotes (a button or field), not the beginning of a longer name.
_NAME = re.compile(rf"(?<![\w'\"“-])(?:{'|'.join(_GROUP)})(?![\w'\"”-]| [A-Z\d])")
_YEAR = re.compile(r"1[1-9]\d\d|20[01]\d")
_LAST_YEAR = 2016
"""When the passages were collected (MS MARCO)."""
_WORD = re.compile(r"[A-Za-z]+")
_TRIES = 50


@dataclass(frozen=True, slots=True)
class Edited:
    """One example. `spans` are the unsupported code points of the answer, none in a twin.

    `kind`: swapped, number, name or date, equal for both of a pair. `source_id` groups a pair (and folds).
    """

    record: Record
    spans: tuple[tuple[int, int], ...]
    kind: str
    source_id: str
    twin: bool


@dataclass(frozen=True, slots=True)
class _Place:
    """A number, name or date of an answer that may be replaced."""

    answer: Labelled
    start: int
    end: int

    @property
    def text(self) -> str:
        return self.answer.record.answer[self.start : self.end]


def swapped(n: int, seed: int, path: Path = PATH) -> list[Edited]:
    """`n` pairs: an answer under another question's passages (all of it unsupported), then its twin.

    Answers of `n` different sources. The other question shares no word of four letters or more with its own.
    Refusals are left out: they stay true. Raises ValueError where there are not `n`.
    """
    chooser = random.Random(seed)
    sources = _clean_sources(path, chooser)
    examples: list[Edited] = []
    for index, answers in enumerate(sources):
        usable = [answer for answer in answers if not _REFUSAL.search(answer.record.answer)]
        if not usable or len(examples) == 2 * n:
            continue
        answer = chooser.choice(usable)
        own = _long_words(answer.record.question)
        others = (sources[(index + step) % len(sources)][0] for step in range(1, len(sources)))
        other = next((o for o in others if own.isdisjoint(_long_words(o.record.question))), None)
        if other is None:
            continue
        record = replace(
            answer.record,
            passages=other.record.passages,
            response_id=f"{answer.record.response_id}:swapped",
        )
        examples += _pair(answer, record, (0, len(record.answer)), "swapped")
    return _enough(examples, n)


def changed(n: int, seed: int, path: Path = PATH) -> list[Edited]:
    """`n` pairs: an answer in which one number, name or date is another (the span), then its twin.

    What is replaced stands once in the answer, within a sentence, and in a passage; what replaces it is of
    the same kind and form and stands nowhere in the record. Answers of `n` different sources; the kind that
    is rarest so far is taken first. Raises ValueError where there are not `n`.
    """
    chooser = random.Random(seed)
    sources = _clean_sources(path, chooser)
    used: Counter[str] = Counter()
    examples: list[Edited] = []
    for answers in sources:
        if len(examples) == 2 * n:
            break
        found = _places(answers)
        for kind in sorted(found, key=lambda kind: used[kind]):
            pair = _first_edit(found[kind], kind, chooser)
            if pair:
                examples += pair
                used[kind] += 1
                break
    return _enough(examples, n)


def _clean_sources(path: Path, chooser: random.Random) -> list[list[Labelled]]:
    """The grounded answers of good quality, by source, in an order that the seed fixes."""
    sources: dict[str, list[Labelled]] = {}
    for answer in load(path):
        if not answer.spans:
            sources.setdefault(answer.source_id, []).append(answer)
    order = sorted(sources)
    chooser.shuffle(order)
    return [sources[source] for source in order]


def _pair(answer: Labelled, record: Record, span: tuple[int, int], kind: str) -> list[Edited]:
    return [
        Edited(record, (span,), kind, answer.source_id, twin=False),
        Edited(answer.record, (), kind, answer.source_id, twin=True),
    ]


def _enough(examples: list[Edited], n: int) -> list[Edited]:
    if len(examples) < 2 * n:
        raise ValueError(f"{n} pairs asked, {len(examples) // 2} can be made from these answers")
    return examples


def _first_edit(places: list[_Place], kind: str, chooser: random.Random) -> list[Edited]:
    """The pair of the first place, in a random order, for which a replacement is found; else nothing."""
    for place in chooser.sample(places, len(places)):
        record = place.answer.record
        texts = [record.question, record.answer, *(passage.text for passage in record.passages)]
        everything = "\n".join(texts).casefold()
        for _ in range(_TRIES):
            new = _OTHER[kind](place.text, chooser)
            # 1500 must not replace anything where a passage says 1,500.
            bare = new.replace(",", "").casefold()
            if new.casefold() in everything or bare in everything.replace(",", ""):
                continue
            edited = replace(
                record,
                answer=record.answer[: place.start] + new + record.answer[place.end :],
                response_id=f"{record.response_id}:{kind}",
            )
            return _pair(place.answer, edited, (place.start, place.start + len(new)), kind)
    return []


def _places(answers: list[Labelled]) -> dict[str, list[_Place]]:
    """What may be replaced in the answers to one question, by kind, the rarest kind first."""
    found: dict[str, list[_Place]] = {"date": [], "name": [], "number": []}
    for answer in answers:
        text = answer.record.answer
        passages = "\n".join(passage.text for passage in answer.record.passages)
        sentences = split_sentences(text, answer.record.language)
        taken: list[tuple[int, int]] = []  # a day is part of its date and not a number
        for kind, pattern in (("date", _DATE), ("name", _NAME), ("number", _NUMBER)):
            for match in pattern.finditer(text):
                start, end = match.span()
                sentence = next((s for s, e in sentences if s <= start and end <= e), None)
                if text.count(match.group()) > 1 or any(start < e and end > s for s, e in taken):
                    continue
                taken.append((start, end))
                # The number of a list item has no word before it.
                marker = sentence is None or (kind == "number" and not _WORD.search(text, sentence, start))
                whole = rf"(?<![\w.,]){re.escape(match.group())}(?!\w|[.,]\d)"
                if not marker and re.search(whole, passages):
                    found[kind].append(_Place(answer, start, end))
    return found


def _other_number(text: str, chooser: random.Random) -> str:
    """Another number of the same format between half and double; a round one stays as round, or half so.

    A year stays within twenty years.
    """
    if _YEAR.fullmatch(text):
        last = min(int(text) + 20, _LAST_YEAR)
        return str(chooser.choice([y for y in range(int(text) - 20, last + 1) if abs(y - int(text)) > 1]))
    digits = re.sub(r"\D", "", text)
    value, zeros = int(digits), len(digits) - len(digits.rstrip("0"))
    step = 10**zeros // 2 or 1
    low, high = max(value // 2, 10 ** (len(digits) - 1)), min(2 * value, 10 ** len(digits) - 1)
    new = iter(str(chooser.randint(-(-low // step), high // step) * step))
    return re.sub(r"\d", lambda _: next(new), text)


def _other_date(text: str, chooser: random.Random) -> str:
    """Another month, and another day where there is one, in the same order."""
    month = re.search(_MONTH, text)
    assert month is not None
    other = chooser.choice([name for name in _MONTHS if name != month.group()])
    day = re.search(r"\d+", text)
    if day is None:
        return other
    new_day = chooser.choice([d for d in range(1, 29) if d != int(day.group())])
    return re.sub(r"\d+", str(new_day), text.replace(month.group(), other))


def _other_name(text: str, chooser: random.Random) -> str:
    """Another name of the same group."""
    return chooser.choice([name for name in _GROUP[text] if name != text])


_OTHER: dict[str, Callable[[str, random.Random], str]] = {
    "date": _other_date,
    "name": _other_name,
    "number": _other_number,
}


def _long_words(text: str) -> set[str]:
    return {word.lower() for word in _WORD.findall(text) if len(word) > 3}


def main() -> None:
    """Print five examples of each set."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--seed", type=int, default=0)
    seed = arguments.parse_args().seed
    for name, examples in (("swapped", swapped(5, seed)), ("changed", changed(5, seed))):
        for edited, twin in zip(examples[::2], examples[1::2], strict=True):
            ((start, end),) = edited.spans
            print(f"{name} {edited.kind}  {edited.record.response_id}  question: {edited.record.question}")
            if edited.kind == "swapped":
                print(f"  answer: {edited.record.answer[:150]!r}")
                print(f"  now under: {edited.record.passages[0].text[:150]!r}\n")
                continue
            text, stop = edited.record.answer, len(twin.record.answer) - len(edited.record.answer) + end
            print(f"  was:  {twin.record.answer[start:stop]}")
            print(
                f"  now:  ...{text[max(0, start - 60) : start]}[{text[start:end]}]{text[end : end + 60]}...\n"
            )


if __name__ == "__main__":
    main()
