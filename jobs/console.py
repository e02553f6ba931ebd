"""What a person sees of a run: its progress, its verdict, and one line when it fails."""

import logging
import os
import sys
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

    from jobs.audit import AuditResult, Threshold
    from jobs.config import Config
    from jobs.logs import LogFormat
    from jobs.progress import Progress


def guard(body: Callable[[], int], debug: bool) -> int:
    """Run `body` and turn what it raises into one line on stderr and an exit code.

    `debug` adds the traceback.
    """
    try:
        return body()
    except KeyboardInterrupt:
        print("leadline: stopped; run the same command again to go on", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `| head` has seen enough; without this the interpreter complains at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:  # the last boundary: a person gets a sentence, not a stack
        if debug:
            import traceback

            traceback.print_exc()
        code, line = _explain(error)
        print(f"leadline: error: {line}", file=sys.stderr)
        return code


def _explain(error: Exception) -> tuple[int, str]:
    from detector.errors import DetectorError
    from jobs.errors import ConfigError, JobError

    line = printable(" ".join(str(error).split()))
    if isinstance(error, (ConfigError, DetectorError)):
        return 2, line
    if isinstance(error, JobError):
        return 1, line
    if isinstance(error, OSError):
        return 1, f"{line}; does the path exist, and may it be read and written?"
    return 1, f"{type(error).__name__}: {line} (not foreseen; --debug shows where)"


@contextmanager
def watch(form: "LogFormat" = "text") -> Iterator[Callable[["Progress"], None] | None]:
    """Show a run while it goes on: a live table on a terminal, elsewhere the driver's own log lines.

    `form` "json" asks for the lines, on a terminal too.
    """
    from jobs.logs import line_handler, logging_to

    if form == "json" or not sys.stderr.isatty():
        with logging_to(line_handler(form)):
            yield None
        return
    from rich.console import Console
    from rich.live import Live
    from rich.logging import RichHandler

    console = Console(stderr=True)
    above = RichHandler(logging.WARNING, console, show_path=False)
    with Live(console=console, transient=True) as live, logging_to(above):
        yield lambda progress: live.update(_table(progress))


def _table(progress: "Progress") -> "Table":
    from rich.table import Table

    from jobs.status import spell_seconds

    cells = {
        "units": f"{progress.n_units_done} of {progress.n_units}",
        "running": str(progress.n_units_running),
        "given up": str(len(progress.failed)),
        "audited": f"{progress.n_audited:,}",
        "rejected": f"{progress.n_rejected:,}",
        "tokens/s": f"{progress.tokens_per_second:,.0f}",
        "left": spell_seconds(progress.eta_seconds),
    }
    table = Table(title=f"run {progress.run_id}")
    for name in cells:
        table.add_column(name, justify="right")
    table.add_row(*cells.values())
    return table


def print_verdict(result: "AuditResult", config: "Config", profile: str | None) -> int:
    """Print what the run came to, in at most six lines. Returns 3 where --fail-over is exceeded, else 0."""
    from jobs.storage import join, mask
    from jobs.tables import REASONS

    totals, share = result.totals, result.flagged_share
    reasons = ", ".join(f"{r} {totals[f'n_{r}']:,}" for r in REASONS if totals[f"n_{r}"])
    print(
        f"{totals['n_read']:,} rows read: {totals['n_audited']:,} answers audited, "
        f"{totals['n_rejected']:,} rejected" + (f" ({reasons})" if reasons else "")
    )
    if share is None:
        print("None could be audited, so nothing is said about them.")
    else:
        print(
            f"{totals['n_flagged_responses']:,} of {totals['n_audited']:,} answers flagged: {share:.1%} "
            f"(95% interval {totals['ci_low']:.1%} to {totals['ci_high']:.1%}); "
            f"{totals['n_flagged_sentences']:,} of {totals['n_sentences']:,} sentences"
        )
        print(_explain_threshold(result.threshold, profile))
        budget = result.threshold.flag_budget
        if not profile and budget is not None and totals["n_sentences"] * budget < 1:
            print("That is less than one sentence here; to see some, add --set judge.flag_budget=0.5")
    print(f"page    {result.report_url}")
    print(f"tables  {join(mask(result.out), 'findings')} and {join(mask(result.out), 'summary')}")
    if config.fail_over is not None and share is not None and share > config.fail_over:
        print(f"leadline: {share:.1%} flagged, over --fail-over {config.fail_over:.1%}", file=sys.stderr)
        return 3
    return 0


def _explain_threshold(threshold: "Threshold", profile: str | None) -> str:
    from jobs.storage import mask

    judged = f"Judged by {threshold.method}"
    if threshold.target_fpr is not None:
        return (
            f"{judged}; the threshold is an operating point: {100 * threshold.target_fpr:.3g}% false alarms "
            f"on its training data ({threshold.data}), not measured on this traffic."
        )
    chosen = mask(profile) if profile else f"the worst {threshold.flag_budget:.0%} of this run's sentences"
    return f"{judged}; the threshold is a budget ({chosen}), not an error rate."


def printable(text: str) -> str:
    """`text` with every control and direction character spelled out: log text must not drive a terminal."""
    return "".join(
        c if c.isprintable() or unicodedata.category(c) == "Zs" else c.encode("unicode_escape").decode()
        for c in text
    )
