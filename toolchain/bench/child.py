"""`python -m toolchain.bench.child PATH BENCH_JSON artifact|eager [CONTEXT_LEN]`: one side alone, for its peak memory.

Prints one line of JSON, a `memory.PeakMemory`. Internal to `dtool bench`.
"""

import sys
from pathlib import Path

from toolchain.bench.latency import check_cases, generate_timed, make_prompts, new_case, prepare
from toolchain.bench.memory import own_memory, use_threads
from toolchain.errors import DtoolError
from toolchain.memory import memory_error
from toolchain.recipe_sections import Bench
from toolchain.runners.open import eager_runner, open_runner
from toolchain.runners.runner import Runner


def main(arguments: list[str]) -> int:
    """Open, generate at the longest prompt length, print the memory taken."""
    path, bench, side = Path(arguments[0]), Bench.model_validate_json(arguments[1]), arguments[2]
    longest = bench.model_copy(update={"prompt_lens": (max(bench.prompt_lens),)})
    try:
        runner = _open(path, bench, side, int(arguments[3]) if any(arguments[3:]) else None)
        check_cases(runner, longest)
        case = new_case(runner, make_prompts(runner.config.vocab_size, longest)[0], longest.new_tokens)
        generate_timed(case, lambda: 0.0)
    except Exception as error:
        worded = error if isinstance(error, DtoolError) else memory_error(error)
        if worded is None:
            raise
        print(worded, file=sys.stderr)  # noqa: T201 - the parent reads it
        return worded.exit_code
    print(own_memory().model_dump_json())  # noqa: T201 - the parent reads it
    return 0


def _open(path: Path, bench: Bench, side: str, context_len: int | None) -> Runner:
    if side == "artifact":
        runner = open_runner(path, threads=bench.threads)
        prepare(runner)
        return runner
    use_threads(bench.threads)
    return eager_runner(path, context_len=context_len)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
