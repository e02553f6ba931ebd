"""What the job raises on purpose.

JobError             exit code 1: the run failed; one line says what to do next
└── ConfigError      exit code 2: nothing was read or written yet
"""


class JobError(Exception):
    """The run cannot go on."""


class ConfigError(JobError):
    """The command, a setting or the state of OUT does not allow the run to start."""
