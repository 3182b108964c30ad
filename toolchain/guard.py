"""The last guard: how every command ends, whatever happens in it.

A failure ends in one message and an exit code, never in a traceback. Known kinds are worded as
dtool's own refusals are. Everything else is a bug of dtool: the message says what failed and names a
file that holds the traceback, to be attached to a report. `DTOOL_TRACEBACK=1` shows tracebacks too.

Output never fails a command whose work is done. Characters that the terminal's encoding lacks are
replaced. A reader that stops reading (`dtool inspect M | head -1`) gets no more, and the command ends
with the exit code it would have had. Progress that cannot be written is dropped. A result that cannot
be written, as on a full disk, is an error that names stdout.
"""

import codecs
import contextlib
import importlib.metadata
import io
import os
import platform
import sys
import tempfile
import traceback
from collections.abc import Iterator
from typing import IO, Any

import click

from toolchain.errors import DtoolError, stopped_by_signals
from toolchain.memory import memory_at_hand, memory_error

TRACEBACK = "DTOOL_TRACEBACK"
INTERRUPTED = 130
RESERVE_BYTES = 8 << 20
"""Addresses kept for the message when memory runs out; no memory, as they are never written."""
REPORTED_PACKAGES = ("dtool", "numpy", "onnx", "onnxruntime", "onnxscript", "tensorrt-rtx", "torch", "transformers")
LOOKALIKES = {"─": "-", "━": "-", "═": "=", "│": "|", "█": "#", "▏": "|", "…": "...", "→": "->"}
"""What stands in for characters of tables where the output's encoding lacks them; `?` for all others."""


@contextlib.contextmanager
def guarded() -> Iterator[None]:
    """Run a command: its failures end the process with one message on stderr and their exit code."""
    with _steady_streams(), stopped_by_signals() as stopped:
        reserve = [bytearray(RESERVE_BYTES)]
        try:
            yield
            sys.stdout.flush()
        except Exception as error:
            if stopped:  # a library made another error of the interrupt
                raise
            reserve.clear()
            sys.exit(end_with(error))


def end_with(error: Exception) -> int:
    """Tell what went wrong on stderr; the exit code."""
    if os.environ.get(TRACEBACK, "0") not in ("", "0"):
        click.echo("".join(traceback.format_exception(error)), err=True)
    if isinstance(error, click.ClickException):
        error.show()
        return error.exit_code
    if isinstance(error, click.exceptions.Abort):
        if isinstance(error.__cause__, EOFError):  # click's word for the end of a terminal's input, which we never read
            return end_with(error.__cause__)
        return INTERRUPTED
    worded = explain(error) or bug(error)
    click.echo(f"error: {worded}", err=True)
    return worded.exit_code


def explain(error: Exception) -> DtoolError | None:
    """An error of a known kind as dtool's own; None for all others, which are bugs."""
    if isinstance(error, DtoolError):
        return error
    if (of_memory := memory_error(error)) is not None:
        return of_memory
    if not isinstance(error, OSError):
        return None
    return DtoolError(
        f"{error.filename} cannot be used" if error.filename else "the system refused a request",
        expected="files and folders that can be read, or written where the command writes",
        found=error.strerror or str(error) or type(error).__name__,
        fix="check the path, its permissions and the free space of its disk",
    )


def bug(error: Exception) -> DtoolError:
    """The message of an error that dtool should have foreseen; its traceback is kept in a file."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" in {frames[-1].filename}, line {frames[-1].lineno}" if frames else ""
    what = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    try:
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", errors="replace", prefix="dtool-bug-", suffix=".txt", delete=False
        ) as file:
            file.write(bug_report(error))
        fix = f"report it with the file {file.name} (it names the command's arguments: read it first)"
    except OSError as fault:
        fix = f"report it with the traceback that {TRACEBACK}=1 shows; no file could be written: {fault.strerror}"
    return DtoolError(
        "dtool failed where it should not: this is a bug",
        expected="a result, or a message that says what to change",
        found=f"{what}{place} (dtool {_version('dtool')})",
        fix=fix,
    )


def bug_report(error: Exception) -> str:
    """What a maintainer needs: versions, system, command and traceback."""
    packages = ", ".join(f"{name} {_version(name)}" for name in REPORTED_PACKAGES)
    facts = (
        f"command: {sys.argv}",
        f"packages: {packages}",
        f"python: {platform.python_version()} on {platform.platform()}",
        f"memory: {memory_at_hand()}",
    )
    return "\n".join([*facts, "", *traceback.format_exception(error)])


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


class Output(io.FileIO):
    """A process's stdout or stderr that fails at most once, with an error that names it."""

    def __init__(self, handle: int, *, results: bool) -> None:
        super().__init__(handle, "wb", closefd=False)
        self.results = results
        self.dropping = False
        """Whether nothing more is written: nobody reads it, or it failed and that was told."""

    def write(self, data: Any) -> int | None:
        """Write what can be written; the rest is dropped."""
        if self.dropping:
            return len(data)
        try:
            return super().write(data)
        except OSError as error:
            self.dropping = True
            if not self.results or isinstance(error, BrokenPipeError):
                return len(data)
            raise DtoolError(
                "the result cannot be written to stdout",
                expected="a terminal, pipe or file that takes it",
                found=error.strerror or str(error),
                fix="send stdout elsewhere, or free space where it goes",
            ) from error


def reader_left() -> bool:
    """Whether nobody reads stdout any more."""
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    return isinstance(raw, Output) and raw.dropping


@contextlib.contextmanager
def _steady_streams() -> Iterator[None]:
    """Put streams in the place of stdout and stderr that no character and no reader can make fail."""
    codecs.register_error("dtool", _replace)
    old = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = _steady(sys.stdout, results=True), _steady(sys.stderr, results=False)
    new = sys.stdout, sys.stderr
    try:
        yield
    finally:
        for stream in new:
            with contextlib.suppress(DtoolError, OSError, ValueError):
                stream.flush()
        sys.stdout, sys.stderr = old


def _steady(stream: Any, *, results: bool) -> IO[str]:
    if stream is None:  # closed before the start
        return open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123 - for the life of the command
    errors = "dtool" if results else "backslashreplace"
    try:
        raw = Output(stream.fileno(), results=results)
    except (AttributeError, OSError, ValueError):  # a stand-in without a file, as tests use
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=errors)
        return stream
    stream.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding=stream.encoding,
        errors=errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


def _replace(error: UnicodeError) -> tuple[str, int]:
    """Stand-ins for characters that an encoding lacks; of a codec's errors only those of writing come here."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    missing = error.object[error.start : error.end]
    return "".join(LOOKALIKES.get(character, "?") for character in missing), error.end
