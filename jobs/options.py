"""Command line options in groups, each written once, and the settings that they amount to.

Each option is a key of the configuration tree as well. Defaults live in `jobs.config` alone: here None means
that nothing was said.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from datetime import date

    from jobs.config import Config


@dataclass(frozen=True)
class Options:
    """What every command takes: where settings come from."""

    config: Annotated[
        str | None,
        typer.Option(metavar="FILE.yaml", help="Settings; --set and the other options go over them."),
    ] = None
    set: Annotated[
        list[str], typer.Option(metavar="KEY=VALUE", help="One setting: judge.flag_budget=0.2. Repeatable.")
    ] = field(default_factory=list)
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False


@dataclass(frozen=True)
class ReadOptions(Options):
    """What decides which rows are read."""

    format: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="jsonl, json, csv, parquet; spans: openinference, langfuse, ..."),
    ] = None
    limit: Annotated[int | None, typer.Option(metavar="N", help="Read at most N rows, in listing order.")] = (
        None
    )


@dataclass(frozen=True)
class DatedOptions(Options):
    """What a day in the names of logs and runs means."""

    date: Annotated[
        str | None,
        typer.Option(
            metavar="YYYY-MM-DD", help="The {today} of LOGS and OUT; default: the day it is in UTC."
        ),
    ] = None


@dataclass(frozen=True)
class JudgeOptions(DatedOptions):
    """What decides which answers are flagged; none of it needs a model."""

    profile: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="Reference profile (a run's profile.json); default: this run itself."
        ),
    ] = None
    methods: Annotated[
        list[str], typer.Option(metavar="NAME,...", help="Scores to compute: blend,gasp. Repeatable.")
    ] = field(default_factory=list)
    target_fpr: Annotated[
        float | None,
        typer.Option(
            metavar="RATE", help="Flag at the bundle's operating point with this false-alarm rate (0.05)."
        ),
    ] = None
    fail_over: Annotated[
        float | None,
        typer.Option(metavar="SHARE", help="Exit with 3 if more than this share of the answers is flagged."),
    ] = None


@dataclass(frozen=True)
class ScorerOptions(Options):
    """What re-reads the answers, and how."""

    scorer: Annotated[
        str | None, typer.Option(metavar="NAME", help="Known name, hub id, local folder or GGUF file.")
    ] = None
    prompt_profile: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="How a record becomes a prompt: plain, chat, refind, ..."),
    ] = None


@dataclass(frozen=True)
class AuditOptions(JudgeOptions, ReadOptions, ScorerOptions):
    """Everything that an audit depends on."""

    bundle: Annotated[
        str | None,
        typer.Option(
            metavar="PATH", help="Trained head that judges: a folder or URL, or none; default: one that fits."
        ),
    ] = None
    loo: Annotated[
        str | None,
        typer.Option(
            metavar="MODE", help="Remove each passage in turn: exact; hide it: masked; neither: off."
        ),
    ] = None
    store_text: Annotated[
        str | None,
        typer.Option(metavar="MODE", help="Texts kept in OUT: full, none, or flagged answers alone."),
    ] = None
    redact: Annotated[
        str | None,
        typer.Option(
            metavar="PATH", help="package.module:function that texts go through before they are stored."
        ),
    ] = None
    workers: Annotated[
        int | None,
        typer.Option(metavar="N", help="Scorers at work; default: one per GPU, else per CPU core."),
    ] = None
    address: Annotated[
        str | None, typer.Option(metavar="URL", help="Ray cluster to join; default: a Ray of its own.")
    ] = None
    log_format: Annotated[
        str | None, typer.Option(metavar="FORM", help="Log lines as text, or as json: an object a line.")
    ] = None


@dataclass(frozen=True)
class PlanOptions(AuditOptions):
    """The options of the audit that is planned, and what its work costs."""

    tokens_per_second: Annotated[
        float | None, typer.Option(metavar="RATE", help="Computed tokens a second of one worker.")
    ] = None
    bench: Annotated[
        str | None, typer.Option(metavar="FILE", help="Take the rate from `leadline bench --json FILE`.")
    ] = None
    price_per_hour: Annotated[
        float | None, typer.Option(metavar="PRICE", help="Of the machine that one worker has.")
    ] = None
    against: Annotated[
        str | None, typer.Option(metavar="OUT", help="Hold the estimate against the run that is there.")
    ] = None


@dataclass(frozen=True)
class LabelledOptions(ScorerOptions):
    """What decides how labelled answers are measured and learned from."""

    methods: Annotated[
        list[str],
        typer.Option(metavar="NAME,...", help="ensemble,lookback,...; or all. Repeatable."),
    ] = field(default_factory=list)
    cache: Annotated[
        str, typer.Option(metavar="FOLDER", help="Where measured answers are kept for the next time.")
    ] = "~/.cache/leadline/traces"
    per_source: Annotated[
        int | None,
        typer.Option(metavar="N", help="At most N answers per source, by a hash of ids."),
    ] = None
    seed: Annotated[int, typer.Option(help="Of folds and of everything random in training.")] = 0


# Which setting an option is. --profile is none: it names a file, not a property of the run.
_KEYS = {
    "scorer": "scorer.name",
    "prompt_profile": "profile",
    "bundle": "bundle",
    "loo": "loo",
    "format": "read.format",
    "limit": "read.limit",
    "store_text": "store_text",
    "redact": "redact",
    "methods": "methods",
    "target_fpr": "judge.target_fpr",
    "fail_over": "fail_over",
    "workers": "workers.count",
    "address": "workers.address",
    "log_format": "log_format",
}


def settings(options: Options) -> "Config":
    """The settings that `options` and its YAML file amount to. Raises ConfigError."""
    from jobs.config import make_config

    return make_config(_given(options))


def settings_of_run(out: str, options: Options) -> "Config":
    """The settings that the run in `out` was made with, and `options` over them. Raises ConfigError.

    Storage options are the given ones alone: a run keeps no credentials.
    """
    from jobs.commit import read_run
    from jobs.config import make_config
    from jobs.storage import Storage

    given = _given(options)
    run = read_run(Storage(given.get("storage") or {}), out)
    then = _merged(run.config | {"storage": {}}, {"judge": _unsaid(given)})
    return make_config(_merged(then, given))


def expand_days(given: dict[str, Any], options: Options, say: Callable[[str], None]) -> dict[str, Any]:
    """What a command was given, `options` among it, with the days in logs, runs and profile written out.

    `say` is told which day today is where nobody has set it and somebody asked. Raises ConfigError.
    """
    from jobs.dates import expand, read_day, utc_today

    if not isinstance(options, DatedOptions):
        return given | {"options": options}
    chosen = options.date and read_day(options.date)

    @cache
    def day() -> "date":
        if chosen:
            return chosen
        today = utc_today()
        say(f"leadline: {{today}} is {today}, in UTC; --date sets another day")
        return today

    urls = {name: given[name] for name in ("logs", "out") if name in given}
    of_options = {name: getattr(options, name, None) for name in ("profile", "against")}
    for found in (urls, of_options):
        for name, value in found.items():
            if isinstance(value, str):
                found[name] = expand(value, day)
            elif value is not None:
                found[name] = [expand(url, day) for url in value]
    options = replace(options, **{name: value for name, value in of_options.items() if value is not None})
    return given | urls | {"options": options}


def names(words: list[str] | None) -> list[str]:
    """`a,b` and `c` as a, b, c."""
    return [name for word in words or [] for name in word.split(",") if name]


def _given(options: Options) -> dict[str, Any]:
    from jobs.config import read_settings
    from jobs.errors import ConfigError

    flags = {key: getattr(options, name, None) for name, key in _KEYS.items()}
    flags["methods"] = names(flags["methods"]) or None
    if isinstance(options, LabelledOptions):
        del flags["methods"]  # those of the papers, not the scores that an audit stores
    if getattr(options, "profile", None) in ("plain", "chat", "refind", "gasp-v1", "gasp-v2"):
        raise ConfigError("--profile takes a file of reference statistics; you mean --prompt-profile")
    return read_settings(options.config, options.set, flags)


def _unsaid(given: dict[str, Any]) -> dict[str, Any]:
    """What of a run's `judge` is void when something else is given anew: the other of the two ways to set a
    threshold, and which of the methods decides where there are other methods.
    """
    judge = given.get("judge")
    pair = {"flag_budget", "target_fpr"}
    anew = pair & set(judge or {}) if isinstance(judge, dict) else set()
    void: dict[str, Any] = dict.fromkeys(pair - anew) if anew else {}
    return void | ({"deciding_method": "auto"} if "methods" in given else {})


def _merged(under: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    merged = dict(under)
    for key, value in over.items():
        section = isinstance(value, dict) and isinstance(under.get(key), dict)
        merged[key] = _merged(under[key], value) if section else value
    return merged
