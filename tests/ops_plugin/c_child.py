"""A child process: passes structs to the library's C entry point as they come. Prints JSON.

It imports next to nothing, so that a test can afford a process of its own.
"""

import ctypes
import json
import sys
from concurrent.futures import ThreadPoolExecutor


def main(library, calls, threads=1):
    plugin = ctypes.CDLL(library)
    plugin.dtool_attention_last_error.restype = ctypes.c_char_p
    with ThreadPoolExecutor(threads) as pool:
        answers = list(pool.map(lambda _: make_calls(plugin, calls), range(threads)))
    print(json.dumps(answers[0] if threads == 1 else answers))


def make_calls(plugin, calls):
    answers = []
    for call in calls:
        if "context" in call:
            ctypes.CDLL("libcuda.so.1").fake_set_context(ctypes.c_size_t(call["context"]))
            continue
        code = plugin.dtool_attention(bytes.fromhex(call["struct"]), ctypes.c_void_p(call["stream"]))
        answers.append([code, plugin.dtool_attention_last_error().decode() if code else ""])
    return answers


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
