"""The options of `leadline bench`, and what they ask for."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

import typer

from jobs.errors import ConfigError
from jobs.options import ScorerOptions, names

if TYPE_CHECKING:
    from jobs.bench_cases import Ask, Growth


@dataclass(frozen=True)
class BenchOptions(ScorerOptions):
    """What is read, in which ways, how often, and against whom."""

    context_tokens: Annotated[int, typer.Option(metavar="C", help="Context of a generated record.")] = 700
    answer_tokens: Annotated[int, typer.Option(metavar="A", help="Answer of a generated record.")] = 200
    passages: Annotated[int, typer.Option(metavar="K", help="Passages of a generated record.")] = 5
    answers: Annotated[
        int | None, typer.Option(metavar="N", help="Answers per round; default 3, with LOGS the first 8.")
    ] = None
    repeats: Annotated[int, typer.Option(metavar="N", help="Rounds; medians are shown.")] = 5
    modes: Annotated[
        list[str],
        typer.Option("--loo", metavar="MODE,...", help="exact,masked,off; default: all but off."),
    ] = field(default_factory=list)
    against: Annotated[
        list[str],
        typer.Option(metavar="NAME,...", help="gasp-rag,separate,padded,reference. Repeatable."),
    ] = field(default_factory=list)
    grow: Annotated[
        list[str],
        typer.Option(metavar="WHAT=N,N,...", help="passages=2,5,10,20 or answers=10,100. Repeatable."),
    ] = field(default_factory=list)
    suite: Annotated[
        bool, typer.Option("--suite", help="The three cases of the README, against gasp-rag.")
    ] = False
    json_file: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Write everything that is printed there.")
    ] = None

    def ask(self) -> "Ask":
        """What to measure. Raises ConfigError before anything is loaded."""
        from jobs.bench_cases import SUITE, Ask
        from jobs.bench_peers import MODES, check
        from jobs.bench_shapes import Shape

        modes = tuple(names(self.modes)) or tuple(mode for mode in MODES if mode != "off")
        peers = tuple(names(self.against)) or (("gasp-rag",) if self.suite else ())
        check(modes, peers)
        if self.repeats < 1 or (self.answers is not None and self.answers < 1):
            raise ConfigError("--repeats and --answers: at least 1 each")
        return Ask(
            shapes=SUITE if self.suite else (Shape(self.context_tokens, self.answer_tokens, self.passages),),
            n_answers=self.answers,
            modes=modes,
            peers=peers,
            repeats=self.repeats,
            growth=tuple(_growth(text) for text in self.grow),
        )


def _growth(text: str) -> "Growth":
    from jobs.bench_cases import Growth

    axis, _, sizes = text.partition("=")
    numbers = [int(size) for size in sizes.split(",") if size.isdecimal() and int(size)]
    if axis not in ("passages", "answers") or len(numbers) < 2 or len(numbers) != len(sizes.split(",")):
        raise ConfigError(f"--grow {text}: write passages=2,5,10 or answers=10,100, two sizes or more")
    return Growth(axis, tuple(numbers))
