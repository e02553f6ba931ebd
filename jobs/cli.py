"""The `leadline` command: options in, one call, a verdict and an exit code out.

Exit codes: 0 done; 1 the job failed; 2 usage or configuration; 3 done, but the share of flagged answers is
over --fail-over; 130 interrupted. Every import that takes time sits inside a function: `leadline --help`
answers at once.
"""

import inspect
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jobs.bench_options import BenchOptions
from jobs.console import guard, print_verdict, watch
from jobs.options import (
    AuditOptions,
    DatedOptions,
    JudgeOptions,
    LabelledOptions,
    Options,
    PlanOptions,
    expand_days,
    settings,
    settings_of_run,
)

if TYPE_CHECKING:
    from jobs.config import Config

app = typer.Typer(
    help="Which sentences of last night's RAG answers rest on nothing: a batch audit without a judge model.",
    add_completion=False,
    pretty_exceptions_enable=False,
)


class OutputFormat(StrEnum):
    """How a command that only reads prints."""

    TABLE = "table"
    JSON = "json"


Logs = Annotated[list[str], typer.Argument(metavar="LOGS...", help="Files, folders or s3:// prefixes.")]
Labels = Annotated[
    list[str], typer.Argument(metavar="LABELLED...", help="Labelled answers: log rows with `spans`.")
]
BundleOut = Annotated[str, typer.Option("--out", metavar="BUNDLE", help="Folder or s3:// prefix for it.")]
Out = Annotated[str, typer.Option(metavar="OUT", help="Folder or s3:// prefix to write the run to.")]
Run = Annotated[str, typer.Argument(metavar="OUT", help="Folder or s3:// prefix that holds a run.")]
Format = Annotated[OutputFormat, typer.Option(help="How to print it.")]


def command(body: Callable[..., int]) -> Callable[..., int]:
    """Register `body` as a command; the fields of its `options` dataclass become options of the command.

    `body` returns the exit code. What it raises becomes one line on stderr.
    """
    parameters = inspect.signature(body).parameters
    group = parameters["options"].annotation
    options = [
        inspect.Parameter(
            option.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=[] if option.default_factory is list else option.default,
            annotation=option.type,
        )
        for option in fields(group)
    ]
    own = [p.replace(kind=p.KEYWORD_ONLY) for name, p in parameters.items() if name != "options"]

    def run(**given: Any) -> None:
        chosen = group(**{option.name: given.pop(option.name) for option in options})
        raise typer.Exit(guard(lambda: body(**expand_days(given, chosen, _say)), chosen.debug))

    run.__signature__ = inspect.Signature(own + options)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in own + options}
    run.__doc__ = body.__doc__
    app.command(body.__name__)(run)
    return body


@command
def demo(
    options: Options,
    out: Out = "leadline-demo",
    fresh: Annotated[bool, typer.Option("--fresh", help="Delete the earlier demo in OUT first.")] = False,
) -> int:
    """Audit the bundled sample logs with the default scorer on this machine."""
    from jobs.demo import SMALL_UNITS, delete_run, sample_logs

    config = settings(replace(options, set=[*SMALL_UNITS, *options.set]))
    if fresh:
        delete_run(out, config)
    return _audit(sample_logs(), out, config, profile=None)


@command
def audit(logs: Logs, out: Out, options: AuditOptions) -> int:
    """Read LOGS, measure every answer, judge, summarise and report into OUT.

    Run it again with the same arguments and it finishes what is missing, and nothing else.
    """
    return _audit(logs, out, settings(options), options.profile)


@command
def plan(logs: Logs, options: PlanOptions, output_format: Format = OutputFormat.TABLE) -> int:
    """Show how LOGS would be read, and what that would take. Takes the options of audit; writes nothing."""
    from jobs.estimate import Prices
    from jobs.plan import make_plan
    from jobs.redaction import load_redaction

    prices = Prices(options.tokens_per_second, options.bench, options.price_per_hour, options.against)
    config = settings(options)
    load_redaction(config.redact)  # an audit would refuse to begin
    found = make_plan(logs, config, prices)
    print(found.to_json() if output_format is OutputFormat.JSON else found.to_text())
    return 0


@command
def status(out: Run, options: DatedOptions, output_format: Format = OutputFormat.TABLE) -> int:
    """Tell how far the run in OUT is, during it and after it. Reads OUT alone."""
    from jobs.status import read_status

    found = read_status(out, settings(options))
    print(found.to_json() if output_format is OutputFormat.JSON else found.to_text())
    return 0


@command
def judge(out: Run, options: JudgeOptions) -> int:
    """Judge a measured run again, with other settings or a reference profile. Loads no model."""
    from jobs.audit import rejudge

    config = settings_of_run(out, options)
    return print_verdict(rejudge(out, config, options.profile), config, options.profile)


@command
def report(out: Run, options: DatedOptions) -> int:
    """Write the page of a finished run again."""
    from jobs.audit import as_judged
    from jobs.commit import read_success
    from jobs.lease import hold
    from jobs.report import write_report
    from jobs.storage import Storage

    config = settings_of_run(out, options)
    with hold(Storage(config.storage), out) as storage:
        success = read_success(storage, out)
        print(write_report(out, storage, config if success is None else as_judged(config, success)))
    return 0


@command
def submit(
    logs: Logs,
    out: Out,
    options: AuditOptions,
    wait: Annotated[bool, typer.Option("--wait", help="Follow the log and exit as the job does.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the request as JSON, contact nobody.")
    ] = False,
    working_dir: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="Run this code, uploaded, not the nodes' package.")
    ] = None,
) -> int:
    """Run the same audit as a job on the Ray cluster whose Jobs API is at --address (http://head:8265)."""
    from jobs.errors import ConfigError
    from jobs.submit import describe, follow
    from jobs.submit import submit as send

    config = settings(options)
    _refuse_overlap(logs, out)
    submission = describe(logs, out, config, profile=options.profile, working_dir=working_dir)
    if dry_run:
        print(submission.to_json())
        return 0
    address = config.workers.address
    if address is None:
        raise ConfigError("submit: to which cluster? Add --address http://head:8265")
    job_id = send(submission, address)
    print(job_id)
    if not wait:
        return 0
    try:
        return follow(job_id, address, lambda text: print(text, end="", flush=True))
    except KeyboardInterrupt:
        print(f"\nleadline: {job_id} goes on without this terminal", file=sys.stderr)
        return 130


@command
def fit(
    labelled: Labels,
    out: BundleOut,
    options: LabelledOptions,
    describe: Annotated[
        str | None, typer.Option(metavar="TEXT", help="The training data in words, for card and page.")
    ] = None,
) -> int:
    """Train heads on LABELLED answers and write a bundle that `leadline audit --bundle` judges with."""
    from jobs.training import train

    train(labelled, out, settings(options), options, describe, _say)
    return 0


@command
def evaluate(
    labelled: Labels,
    options: LabelledOptions,
    out: Annotated[
        str | None, typer.Option(metavar="OUT", help="Folder or s3:// prefix for JSON, Parquet, markdown.")
    ] = None,
    against: Annotated[
        str, typer.Option(metavar="NAME", help="The method that differences are taken to.")
    ] = "overlap",
    leave_out: Annotated[
        str | None,
        typer.Option(metavar="WHAT", help="generator: also by heads that saw none of its answers."),
    ] = None,
    verifier: Annotated[
        list[str] | None,
        typer.Option(metavar="KIND:MODEL", help="Put nli:MODEL or tokens:MODEL beside them. Repeatable."),
    ] = None,
    features: Annotated[
        bool, typer.Option("--features", help="LABELLED is a folder of the GASP author's feature files.")
    ] = False,
) -> int:
    """Compare methods on LABELLED answers: AUROC, AP, F1, IoU with intervals, folds by source."""
    from jobs.training import compare, compare_published

    config = settings(options)
    if features:
        print(compare_published(labelled, out, config))
    else:
        print(compare(labelled, out, config, options, against, leave_out, verifier or [], _say))
    return 0


@command
def bench(
    options: BenchOptions,
    logs: Annotated[
        list[str] | None, typer.Argument(metavar="[LOGS...]", help="Real answers; default: generated ones.")
    ] = None,
) -> int:
    """Measure what the scorer costs here: speed, share of each part, memory, against other ways to do it."""
    from jobs.bench import run

    run(logs or [], settings(options), options, _say)
    return 0


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@app.callback(invoke_without_command=True)
def _without_command(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        from importlib.metadata import version as installed

        print(f"leadline {installed('leadline')}")
    elif context.invoked_subcommand is None:
        print(context.get_help())


def main() -> int:
    """The console script. Returns the exit code."""
    try:
        return app(standalone_mode=False) or 0
    except typer.TyperException as error:
        message = error.format_message().rstrip(".")
        print(f"leadline: error: {message}; see leadline --help", file=sys.stderr)
        return 2


def _audit(logs: list[str], out: str, config: "Config", profile: str | None) -> int:
    from jobs.audit import audit

    _refuse_overlap(logs, out)
    with watch(config.log_format) as on_progress:
        result = audit(logs, out, config, profile=profile, on_progress=on_progress)
    return print_verdict(result, config, profile)


def _refuse_overlap(logs: list[str], out: str) -> None:
    """A run inside its own logs would read its own tables the next time."""
    from jobs.errors import ConfigError
    from jobs.storage import mask

    for log in logs:
        if f"{_canonical(out)}/".startswith(f"{_canonical(log)}/"):
            raise ConfigError(
                f"--out {mask(out)}: lies in the logs {mask(log)} and would be read with them; choose another"
            )


def _canonical(url: str) -> str:
    scheme, separator, path = url.rpartition("://")
    if scheme in ("", "file"):
        return str(Path(path).resolve()).rstrip("/")
    return f"{scheme.replace('s3a', 's3')}{separator}{path.rstrip('/')}"


if __name__ == "__main__":
    sys.exit(main())
