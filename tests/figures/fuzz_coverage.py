"""Every reader under atheris, which keeps and changes the inputs that reach code no input had reached before.

    pip install atheris                                            # Apache-2.0; nothing else here needs it
    python -m tests.figures.fuzz_coverage -max_total_time=600      # options are libFuzzer's

`fuzz_readers` changes whole samples by rules and never learns from what came of it; this one begins with its
inputs and learns. What is held of an input is the same (`fuzz_readers.read`). The first byte chooses the
ending of the file's name, the second how it is read. An input that breaks something ends the script and is
kept where libFuzzer says.
"""

import random
import sys
import tempfile
from pathlib import Path

try:
    import atheris
except ImportError:
    sys.exit("fuzz_coverage: needs the package atheris (pip install atheris)")

with atheris.instrument_imports(include=["jobs"]):
    from jobs.storage import Storage
    from tests.figures import fuzz_readers

ENDINGS = sorted({name.split(".", 1)[1] for name in fuzz_readers.NAMES})
_SEEDS_PER_READER = 20
_STORAGE = Storage()


def main() -> None:
    """Runs until libFuzzer's options say that it is enough."""
    with tempfile.TemporaryDirectory(prefix="fuzz-coverage-") as name:
        folder, seeds = Path(name), Path(name) / "seeds"
        seeds.mkdir()
        for reader in fuzz_readers.NAMES:
            ending = ENDINGS.index(reader.split(".", 1)[1])
            for number in range(_SEEDS_PER_READER):
                data = bytes((ending, number)) + fuzz_readers.make(reader, number, seed=1)
                (seeds / f"{reader}-{number}").write_bytes(data)
        limits = ["-max_len=65536", "-rss_limit_mb=8192", "-timeout=30"]
        # It ends the process itself, with a report; what was given comes last and wins.
        atheris.Setup([sys.argv[0], *limits, *sys.argv[1:], str(seeds)], lambda data: _read(folder, data))
        atheris.Fuzz()


def _read(folder: Path, data: bytes) -> None:
    if len(data) < 2:
        return
    path = folder / f"fuzz.{ENDINGS[data[0] % len(ENDINGS)]}"
    path.write_bytes(data[2:])
    fuzz_readers.read(path, random.Random(data[1]), _STORAGE)


if __name__ == "__main__":
    main()
