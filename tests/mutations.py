"""Seeded mutations of what commands read: JSON trees, recipes, bytes, safetensors headers, sealed artifacts."""

import copy
import json
import struct
from pathlib import Path

ODD = (
    None,
    True,
    -1,
    0,
    1,
    3,
    2**40,
    2**70,
    0.5,
    -1e300,
    float("nan"),
    float("inf"),
    "",
    "x",
    "int8",
    "\ud800",
    "../..",
    [],
    [None],
    [[1]],
    {},
    {"a": 1},
)
"""Values of every type, and sizes that overflow something."""


def places(tree, here=()):
    """The paths of all values of a JSON tree."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        yield (*here, key)
        yield from places(value, (*here, key))


def mutate_tree(random, tree):
    """Change one value of a JSON tree, drop one, or add one; what was done, for a failure to name."""
    path = random.choice(list(places(tree)) or [()])
    if not path:
        return "nothing"
    *above, last = path
    spot = tree
    for key in above:
        spot = spot[key]
    how = random.random()
    if how < 0.2:
        del spot[last]
        return f"without {path}"
    if how < 0.3 and isinstance(spot, dict):
        spot["unheard_of"] = copy.deepcopy(random.choice(ODD))
        return f"{path[:-1]} with unheard_of = {spot['unheard_of']!r}"
    spot[last] = copy.deepcopy(random.choice(ODD))
    return f"{path} = {spot[last]!r}"


def mutate_bytes(random, data):
    """Cut, flip, blank or insert some bytes, those at the front more often; what was done."""
    data, size = bytearray(data), len(data)
    at = random.randrange(min(size, random.choice((64, 1000, size))) or 1)
    kind = random.choice(("cut", "flip", "blank", "insert", "mark", "empty"))
    if kind == "cut":
        del data[at:]
    elif kind == "flip":
        for _ in range(random.choice((1, 1, 8))):
            data[random.randrange(at, min(at + 64, size))] ^= 1 << random.randrange(8)
    elif kind == "blank":
        data[at : at + 16] = bytes(min(16, size - at))
    elif kind == "insert":
        data[at:at] = random.randbytes(random.choice((1, 8)))
    elif kind == "mark":
        data[:0] = b"\xef\xbb\xbf"
    else:
        data.clear()
    return bytes(data), f"{kind} at {at} of {size}"


def mutate_file(random, path: Path):
    """Mutate the bytes of a file in place."""
    data, done = mutate_bytes(random, path.read_bytes())
    path.write_bytes(data)
    return f"{path.name}: {done}"


def mutate_json(random, path: Path):
    """Mutate a JSON file as a tree: one value, or two, or its depth."""
    document = json.loads(path.read_text("utf-8"))
    if random.random() < 0.05:
        deep = "[" * 100_000 + "]" * 100_000
        path.write_text(f'{{"deep": {deep}}}')
        return f"{path.name}: deep"
    done = [mutate_tree(random, document) for _ in range(random.choice((1, 1, 2)))]
    path.write_text(json.dumps(document), "utf-8")
    return f"{path.name}: {', '.join(done)}"


def mutate_header(random, path: Path):
    """Mutate the header of a safetensors file as a tree, the data staying as it is."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    done = mutate_tree(random, header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])
    return f"{path.name}: header, {done}"


def to_toml(tree):
    """A JSON tree as the lines of a TOML file; what TOML cannot say is left out."""
    return "".join(f"{json.dumps(key)} = {_toml(value)}\n" for key, value in tree.items() if value is not None)


def _toml(value):
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(k)} = {_toml(v)}" for k, v in value.items() if v is not None) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(_toml(v) for v in value if v is not None) + "]"
    if isinstance(value, float):
        return repr(value)
    return json.dumps(value)
