"""Read a Parquet file with each byte of its footer damaged in turn: a process that a test may lose.

    python -m tests.jobs.formats.damaged_footers FILE

Prints how many files were read and how many rows came out, rejects among them.
"""

import sys
from pathlib import Path

from tests.jobs.formats.reading import read

_DAMAGES = (0x08, 0xFF)


def main() -> None:
    """Read them all; whatever is raised ends it."""
    path = Path(sys.argv[1])
    whole = path.read_bytes()
    first = len(whole) - 8 - int.from_bytes(whole[-8:-4], "little")
    n_files = n_rows = 0
    for at in range(first, len(whole)):
        for damage in _DAMAGES:
            path.write_bytes(whole[:at] + bytes([whole[at] ^ damage]) + whole[at + 1 :])
            print(f"byte {at} ^ {damage}", file=sys.stderr)
            n_rows += len(read(path))
            n_files += 1
    print(n_files, n_rows)


if __name__ == "__main__":
    main()
