"""Failures a user can act on: what was expected, what was found, what to do.

Exit codes: 1 user error (`DtoolError`), 2 usage (click's own), 3 a gate failed (`GateFailed`), 130 and 143
stopped by Ctrl-C or a request to end.
"""

import contextlib
import difflib
import signal
import sys
from collections.abc import Iterable, Iterator
from typing import Any


class DtoolError(Exception):
    """A request that cannot be met; its text says what was expected, found, and what to do."""

    exit_code = 1

    def __init__(self, problem: str, *, expected: str = "", found: str = "", fix: str = "") -> None:
        self.problem = problem
        self.expected = expected
        self.found = found
        self.fix = fix
        super().__init__(self.render())

    def render(self) -> str:
        """The message as the command line prints it, the lines of each part aligned."""
        parts = [("expected", self.expected), ("found", self.found), ("to do", self.fix)]
        lines = (f"  {name + ':':<10}{text}".replace("\n", "\n" + " " * 12) for name, text in parts if text)
        return "\n".join([self.problem, *lines])


class GateFailed(DtoolError):
    """A proof ran to its end and a gate of the recipe was not met."""

    exit_code = 3


def name_list(names: Iterable[str], limit: int = 5) -> str:
    """`a, b, c and 7 more`: the first names of a list and how many were left out."""
    names = list(names)
    head = ", ".join(names[:limit])
    return head if len(names) <= limit else f"{head} and {len(names) - limit} more"


def did_you_mean(name: str, choices: Iterable[str]) -> str:
    """A hint naming near matches of `name`, or all the choices when none is near."""
    choices = sorted(choices)
    near = difflib.get_close_matches(name, choices, n=3, cutoff=0.5)
    return f"did you mean {name_list(near)}?" if near else f"one of: {name_list(choices, 20)}"


@contextlib.contextmanager
def stopped_by_signals() -> Iterator[list[int]]:
    """End the block and the process on Ctrl-C and SIGTERM, by an exception: what is half-written is removed.

    Yields the list of the signals that came, empty until one does.

    The exit code says so, whatever a library in the middle of its import makes of that exception.
    """
    stopped: list[int] = []

    def stop(number: int, _frame: Any) -> None:
        stopped.append(number)
        raise KeyboardInterrupt

    for number in (signal.SIGTERM, signal.SIGINT):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, stop)
    try:
        yield stopped
    except BaseException:
        if not stopped:
            raise
        sys.stderr.write("interrupted; nothing half-written was left\n")
        sys.exit(128 + stopped[0])
