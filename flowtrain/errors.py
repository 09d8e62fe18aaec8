"""The exception tree: each kind of failure names the exit code that a user's script sees (contract C11).

Every `FlowTrainError` is one sentence that says what happened, where (file:line, key path or row id), and what to
change. `assert` is for our own bugs and ends as exit code 1.
"""

from __future__ import annotations

EXIT_DONE = 0
EXIT_BUG = 1
EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143


class FlowTrainError(Exception):
    """A failure that has been understood. `exit_code` is what the process ends with."""

    exit_code: int = EXIT_BUG


class ConfigError(FlowTrainError, ValueError):
    """The config, a command line value or a model folder cannot be used as written."""

    exit_code = 2


class DataError(FlowTrainError, ValueError):
    """A row, an image or a data file cannot be used, and the policy says to stop."""

    exit_code = 3


class PlanError(FlowTrainError):
    """The plan does not fit what is there: devices, cores, memory, pool, or a model that cannot be packed."""

    exit_code = 4


class LostProcessError(FlowTrainError):
    """A process of the run died or stopped answering."""

    exit_code = 5


class PeerError(FlowTrainError):
    """A collective failed because another rank is gone; never the true cause when a better one is known."""

    exit_code = 5


class Interrupted(FlowTrainError):
    """The run was asked to stop by SIGINT."""

    exit_code = EXIT_INTERRUPTED


class Terminated(FlowTrainError):
    """The run was asked to stop by SIGTERM."""

    exit_code = EXIT_TERMINATED
