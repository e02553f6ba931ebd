"""`leadline bench`: what a scorer costs here, against its own floor and against other ways to the numbers.

The command and its tables. `python -m jobs.bench --gpu-suite` measures models of random weights and needs
only torch, transformers and numpy, which is why nothing heavier is imported before it is needed.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jobs.console import guard

if TYPE_CHECKING:
    from jobs.bench_options import BenchOptions
    from jobs.config import Config

_WIDTH = 124  # of the widest table; a narrower terminal wraps lines, which is better than cut numbers


def run(logs: Sequence[str], config: "Config", options: "BenchOptions", say: Callable[[str], None]) -> None:
    """Measure what the options ask for, print it, and write it where they say. Raises ConfigError."""
    ask = options.ask()
    from jobs.bench_cases import bench, cases_of
    from jobs.bench_peers import ScorerSpec

    spec = ScorerSpec(**config.scorer.model_dump(), profile=config.profile)
    scorer = spec.load()
    found = bench(ask, spec, scorer, cases_of(logs, config, ask, scorer, joined=options.suite), say)
    show(found)
    if options.json_file is not None:
        write(found, options.json_file)


def write(found: Any, file: str) -> None:
    """Everything that was measured, as JSON."""
    Path(file).write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


def main() -> int:
    """`python -m jobs.bench --gpu-suite [--tiny] [--json FILE]`. Returns the exit code."""
    arguments = argparse.ArgumentParser(description="What Leadline costs on a GPU, on random weights.")
    arguments.add_argument("--gpu-suite", action="store_true", required=True)
    arguments.add_argument("--tiny", action="store_true", help="a dry run with a tiny model on any machine")
    arguments.add_argument("--model", help="one of the two shapes alone, where time is short")
    arguments.add_argument("--repeats", type=int, default=5)
    arguments.add_argument("--json", metavar="FILE")
    chosen = arguments.parse_args()

    def body() -> int:
        from jobs.bench_gpu import QWEN, run_suite

        models = ("tiny",) if chosen.tiny else (chosen.model,) if chosen.model else QWEN
        run_suite(models, chosen.repeats, chosen.json, lambda text: print(text, file=sys.stderr))
        return 0

    return guard(body, debug=False)


def show(found: dict[str, Any]) -> None:
    """Print `found` as `jobs.bench.bench` returns it."""
    machine, scorer, versions = found["machine"], found["scorer"], found["versions"]
    print(
        f"{scorer['name']} ({scorer['fingerprint']}), {scorer['dtype']}, profile {scorer['profile']}; "
        f"{machine['gpu'] or machine['cpu']}, {machine['cores']} cores, {machine['threads']} threads; "
        f"torch {versions['torch']}, transformers {versions['transformers']}"
    )
    for case in found["cases"]:
        _show_case(case, found["repeats"])
    for growth in found["growth"]:
        _show_growth(growth)


def _show_case(case: dict[str, Any], repeats: int) -> None:
    answers = "answer" if case["n_answers"] == 1 else "answers"
    title = (
        f"{case['n_answers']:,} {answers} ({case['source']}), C = {case['mean_context_tokens']:,.0f} tokens, "
        f"A = {case['mean_answer_tokens']:,.0f} tokens, K = {case['mean_pieces']:.3g}; "
        f"medians of {repeats} rounds"
    )
    columns = (
        "", "s/answer", "min", "max", "answers/s", "tokens/s", "tokens", "of floor", "FLOP use",
        "extra peak", "off exact",
    )  # fmt: skip
    show_table(title, columns, [_contender(row) for row in case["contenders"]])
    if case["out_of_memory"]:
        print(f"out of memory, so not measured: {', '.join(case['out_of_memory'])}")
    modes = {row["name"]: row["shares"] for row in case["contenders"] if "shares" in row}
    parts = dict.fromkeys(part for shares in modes.values() for part in shares)
    shares = [[name, *(f"{found[part]:.1%}" for part in parts)] for name, found in modes.items()]
    show_table("Share of time, one answer", ("", *parts), shares)
    if case["ratios"]:
        rows = [
            [f"{r['mode']} against {r['peer']}", *_spread(r["time"], "x"), _times(r["memory"])]
            for r in case["ratios"]
        ]
        columns = ("", "times as fast", "min", "max", "times less extra peak")
        show_table("Ratios, round by round", columns, rows)
    noise = case["noise_floor_nats"]
    print(
        f"noise floor: {noise['logprob']:.1e} nats of a log-probability, {noise['jsd']:.1e} nats of a "
        f"divergence; matrix product: {case['matrix_flops_per_second'] / 1e9:,.0f} GFLOP/s"
    )


def _contender(row: dict[str, Any]) -> list[str]:
    difference = row.get("difference_from_exact_nats")
    return [
        row["name"],
        *_spread(row["seconds_per_answer"]),
        f"{row['answers_per_second']:.3g}",
        f"{row['tokens_per_second']:,.0f}",
        f"{row['tokens_per_answer']:,.0f}",
        f"{row['tokens_over_floor']:.3f}x" if "tokens_over_floor" in row else "",
        f"{row['flop_utilisation']:.0%}" if "flop_utilisation" in row else "",
        _mebibytes(row.get("extra_peak_bytes")),
        f"{max(difference.values()):.0e} nats" if difference else "",
    ]


def _show_growth(growth: dict[str, Any]) -> None:
    shape, axis = growth["shape"], growth["axis"]
    fixed = f"C = {shape['context_tokens']:,}, A = {shape['answer_tokens']:,}"
    if axis == "answers":
        fixed += f", K = {shape['passages']:,}"
    rows = [
        [
            mode["name"],
            f"{row['size']:,}",
            *_spread(row["seconds_per_answer"]),
            f"{row['tokens_per_answer']:,.0f}",
        ]
        for mode in growth["modes"]
        for row in mode["sizes"]
    ]
    show_table(f"Growth with {axis} at {fixed}", ("", axis, "s/answer", "min", "max", "tokens/answer"), rows)
    for mode in growth["modes"]:
        if line := mode["line"]:
            print(
                f"{mode['name']}: a passage more takes {line['seconds_per_passage'] * 1e3:,.1f} ms and "
                f"{line['tokens_per_passage']:,.0f} tokens; r² of the straight line {line['r_squared']:.3f}"
            )


def show_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table; plain text where rich is missing."""
    try:
        from rich.box import SIMPLE_HEAD
        from rich.console import Console
        from rich.table import Table
    except ImportError:  # a bare GPU machine
        print(f"\n{title}", *("\t".join(row) for row in (columns, *rows)), sep="\n")
        return
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    Console(width=max(Console().width, _WIDTH)).print(table)


def _spread(values: dict[str, float], unit: str = "") -> list[str]:
    return [f"{values[name]:.3g}{unit}" for name in ("median", "min", "max")]


def _mebibytes(n_bytes: int | None) -> str:
    return "" if n_bytes is None else f"{n_bytes / 2**20:,.0f} MiB"


def _times(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.3g}x"


if __name__ == "__main__":
    sys.exit(main())
