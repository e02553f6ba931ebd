"""What the job raises on purpose.

JobError             exit code 1: the run failed; one line says what to do next
└── ConfigError      exit code 2: nothing was read or written yet
"""


class JobError(Exception):
    """The run cannot go on."""


class ConfigError(JobError):
    """The command, a setting or the state of OUT does not allow the run to start."""


def first_line(error: BaseException) -> str:
    """The first line of an error's message, short enough for a line of a log."""
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else "no message"
