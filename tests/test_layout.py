"""The shape of the repository: who may import whom, how long a file may be, what the README must name."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
NOT_FOR_THE_DETECTOR = set("jobs ray fsspec s3fs pyarrow polars pydantic typer rich yaml".split())
# What transformers itself brings along cannot be missing where it is installed.
BROUGHT_BY_TRANSFORMERS = set("typer rich yaml".split())
SLOW_TO_IMPORT = set("torch transformers ray polars pyarrow numpy fsspec pydantic rich".split())
TOP_LEVEL = set("detector jobs tests cluster.yaml pyproject.toml Makefile README.md LICENSE".split())


def python_files(*folders):
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def imported_packages(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module.split(".")[0]


def run_python(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)


@pytest.mark.parametrize("path", python_files("detector"), ids=lambda p: p.name)
def test_the_detector_imports_neither_jobs_nor_what_jobs_needs(path):
    assert not NOT_FOR_THE_DETECTOR & set(imported_packages(path))


def test_the_detector_runs_on_a_machine_without_what_jobs_needs():
    result = run_python(
        "import sys, pkgutil, importlib\n"
        f"sys.modules.update(dict.fromkeys({sorted(NOT_FOR_THE_DETECTOR - BROUGHT_BY_TRANSFORMERS)!r}))\n"
        "import detector\n"
        "for module in pkgutil.walk_packages(detector.__path__, 'detector.'):\n"
        # Imported where triton is, which torch brings along for CUDA alone.
        "    if module.name == 'detector.vocabulary_kernel': continue\n"
        "    importlib.import_module(module.name)\n"
    )
    assert result.returncode == 0, result.stderr


def test_the_command_line_starts_without_any_heavy_import():
    """What keeps `leadline --help` under half a second; a timed test would fail on a busy machine."""
    result = run_python(f"import sys, jobs.cli; print(*sorted({SLOW_TO_IMPORT!r} & set(sys.modules)))")
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == []


@pytest.mark.parametrize(
    "path", python_files("detector", "jobs", "tests"), ids=lambda p: str(p.relative_to(ROOT))
)
def test_no_file_reaches_500_lines(path):
    assert len(path.read_text().splitlines()) < 500


def test_the_top_level_holds_only_what_is_agreed():
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    if listed.returncode != 0:
        pytest.skip("not a git checkout: tracked and ignored files cannot be told apart")
    entries = {line.split("/")[0] for line in listed.stdout.splitlines()}
    assert {entry for entry in entries if not entry.startswith(".")} <= TOP_LEVEL


def command_line():
    """Every command and every long option, as typer knows them."""
    import typer

    from jobs.cli import app

    for name, command in typer.main.get_command(app).commands.items():
        yield name
        for parameter in command.params:
            yield from (option for option in parameter.opts if option.startswith("--") and option != "--help")


@pytest.mark.parametrize("word", sorted(set(command_line())))
def test_the_readme_names_every_command_and_option(word):
    readme = (ROOT / "README.md").read_text()
    wanted = word if word.startswith("--") else f"leadline {word}"
    assert re.search(rf"(?<![\w-]){wanted}(?![\w-])", readme), f"README.md does not mention {wanted}"
