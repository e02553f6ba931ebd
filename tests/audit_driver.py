"""An audit in a process of its own that sends itself a signal (`kill -9`) at a chosen moment.

    python -m tests.audit_driver JSON    # {"logs", "out", "config", "moment", "signal"}

Moments: "start" (nothing is measured), "middle" (half of the units are), "late" (nine of ten, and workers are
well into the next ones), "measured" (all are, nothing is judged), "reported" (all but _SUCCESS is written),
"never".
"""

import json
import os
import signal
import sys
import time

import jobs.audit
from jobs.audit import Progress, audit
from jobs.config import Config
from tests import fake_scorer

_SHARES = {"middle": 0.5, "late": 0.9}


def main() -> None:
    """Run the audit that the first argument describes."""
    spec = json.loads(sys.argv[1])
    moment, number = spec["moment"], signal.Signals[spec["signal"]]

    def die(*_: object) -> None:
        os.kill(os.getpid(), number)

    def watch(progress: Progress) -> None:
        share = progress.n_units_done / progress.n_units
        if (moment, share) == ("start", 0) or (moment in _SHARES and share >= _SHARES[moment]):
            time.sleep(0.3 if moment == "late" else 0.0)
            die()
        if moment == "measured" and share == 1:
            die()

    if moment == "reported":
        jobs.audit.finish = die
    result = audit(
        spec["logs"],
        spec["out"],
        Config.model_validate(spec["config"]),
        on_progress=watch,
        identify=fake_scorer.identify,
        load=getattr(fake_scorer, spec.get("load", "load")),
    )
    print(json.dumps(result.totals))


if __name__ == "__main__":
    main()
