"""Kinds of errors: who is at fault, and what follows from it.

========================  =========================================================================
the model                 scored: the environment answers with an error observation and counts it
the user's input          :class:`Refused`: one line, exit code 2, nothing written
a check on the evidence   :class:`CheckFailed`: the check and the record are named, exit code 1
the environment itself    :class:`EnvironmentFault`: the run stops with it, the evidence is kept
========================  =========================================================================

Anything else is a defect and keeps its traceback.
"""


class Refused(Exception):
    """Input that a stage cannot work with. The text says what is wrong, where, and what to do."""


class CheckFailed(Exception):
    """A check that the evidence did not pass. The text names the check and the record."""


class EnvironmentFault(BaseException):
    """The environment broke while it answered the policy.

    Not an ``Exception``: TRL 0.29.0 catches those around a tool call and shows them to the policy as an
    observation, so that a broken environment would be trained on.
    """


def one_line(error: Exception) -> str:
    """What an error of somebody else's says, for a place in a line of ours."""
    return " ".join(str(error).split())[:200]
