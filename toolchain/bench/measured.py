"""`python measured.py COMMAND...`: run a command cold and print what it cost, as one line of JSON.

{"exit", "wall_s", "cpu_s", "peak_rss_bytes", "output_tail"}. CPU is user + system of the command and
of the children it waited for; the peak is that of its largest process, mapped files included.

A program of its own, with the standard library only, for two reasons. The kernel hands the peak of
the process that forks on to the one that is executed, so a command started straight from a large
process (pytest with torch in it) would show at least that size; started from here, it inherits ten
megabytes. And the same measure must run in the environment of another tool, where dtool is not.
"""

import json
import os
import subprocess
import sys
import tempfile
import time

TAIL_BYTES = 4000


def run_measured(command: list[str]) -> dict[str, object]:
    """Run `command` with its output caught; exit code, seconds, peak resident bytes, last output."""
    with tempfile.TemporaryFile() as output:
        begin = time.perf_counter()
        child = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)  # noqa: S603
        _, status, usage = os.wait4(child.pid, 0)
        wall_s = time.perf_counter() - begin
        child.returncode = os.waitstatus_to_exitcode(status)
        output.seek(max(0, output.seek(0, os.SEEK_END) - TAIL_BYTES))
        tail = output.read().decode("utf-8", "replace")
    return {
        "exit": child.returncode,
        "wall_s": wall_s,
        "cpu_s": usage.ru_utime + usage.ru_stime,
        "peak_rss_bytes": usage.ru_maxrss << 10,
        "output_tail": tail,
    }


if __name__ == "__main__":
    print(json.dumps(run_measured(sys.argv[1:])))  # noqa: T201 - the caller reads it
