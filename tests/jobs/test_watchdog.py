"""A process that hangs ends itself; one that gives signs of life does not."""

import subprocess
import sys

import pytest

CODE = """
import sys, time
from jobs.watchdog import Watchdog
dog = Watchdog(0.4, sys.stderr)
for _ in range({n_signs}):
    dog.alive()
    time.sleep(0.1)
{then}
time.sleep(1.0)
print("lived")
"""


@pytest.mark.parametrize(("then", "lives"), [("", False), ("dog.rest()", True)])
def test_a_hang_ends_the_process_and_shows_where(then, lives):
    code = CODE.format(n_signs=7, then=then)
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (ran.returncode == 0, "lived" in ran.stdout) == (lives, lives)
    assert ("line 9 in <module>" in ran.stderr) == (not lives)
