"""The one small tree of exceptions that groupwise raises for a user's mistake.

Every message is one sentence that names the value, the rule it breaks and the remedy. The command line prints the message
without a traceback and exits with code 2. A broken invariant of our own is an ``assert``, never one of these.
"""

__all__ = [
    "NO_WINDOWS",
    "AnswerError",
    "CheckpointError",
    "ConfigError",
    "DataError",
    "GroupwiseError",
    "ModelError",
    "RankError",
    "RewardError",
    "StoppedError",
    "TrainingError",
    "UncheckedAnswerError",
    "printable",
]

NO_WINDOWS = "Windows is not supported: run it in WSL, the Windows Subsystem for Linux"


def printable(text: str) -> str:
    """``text`` in one line, with line breaks and whatever a terminal would obey shown as escapes."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


class GroupwiseError(Exception):
    """Base of all errors that a user can fix; ``exit_code`` is what the command line exits with."""

    exit_code = 2
    told = False
    """Whether another process of the run tells it to the user."""


class ConfigError(GroupwiseError):
    """A setting is unknown, of the wrong type, out of range, or contradicts another."""


class DataError(GroupwiseError):
    """A data source is missing, empty, unreadable, or lacks a column."""


class AnswerError(DataError):
    """A reference answer cannot be extracted from its row."""


class UncheckedAnswerError(GroupwiseError):
    """Whether an answer is right could not be found out: math-verify took too long, or its process died."""


class ModelError(GroupwiseError):
    """A model folder or name cannot be loaded, or does not fit what is asked of it."""


class RewardError(GroupwiseError):
    """A reward function cannot be loaded, raised, timed out, or returned something other than one number per completion."""


class CheckpointError(GroupwiseError):
    """A checkpoint is incomplete, damaged, or belongs to another run."""


class TrainingError(GroupwiseError):
    """Training (or judging, or answering) cannot go on: for example, the gradient is not finite several steps in a row, or memory ran
    out."""

    exit_code = 1


class _WithExitCode(GroupwiseError):
    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code

    def __reduce__(self) -> tuple[type, tuple[str, int]]:  # errors travel between processes
        return type(self), (str(self), self.exit_code)


class StoppedError(_WithExitCode):
    """Somebody stopped the run by a signal, and it saved itself. The exit code is the shells': 128 + the signal's number."""


class RankError(_WithExitCode):
    """Another process of the same run failed or was lost; the message and the exit code are that one's."""
