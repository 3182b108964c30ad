"""Chat templates: Jinja as models are published with it, in a sandbox.

transformers lays out conversations in an environment of its own. This one gives the same text without
importing transformers, for hosts that generate from an artifact and have no other use for it. Templates
find here what they find there: trimmed blocks, `break` and `continue`, `{% generation %}` (which marks
the assistant's words for training and writes them as they are), `raise_exception`, `strftime_now`,
`tojson` that escapes nothing, and `tools` and `documents` that are None.
`tests/test_odd_tokenizers.py` compares the two.
"""

import datetime as dt
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

# Names under which chats carry the reasoning of a model before its answer, the common one first.
REASONING = ("reasoning_content", "thinking", "reasoning")


def render(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    special: Mapping[str, str],
    *,
    add_generation_prompt: bool,
    now: dt.datetime | None,
) -> str:
    """Lay out a conversation.

    `special` are the texts of the special tokens by their names; `now` is the time that `strftime_now`
    tells, by default this moment. Raises what Jinja and the template raise.
    """
    return compiled(template, now).render(
        messages=[_plain_message(message) for message in messages],
        tools=None,
        documents=None,
        add_generation_prompt=add_generation_prompt,
        **special,
    )


def _plain_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Copy a message without keys that hold None, its reasoning under both names templates use."""
    plain = {key: value for key, value in message.items() if value is not None}
    reasoning = next((plain[name] for name in REASONING if name in plain), None)
    if reasoning is None:
        return plain
    return {"thinking": reasoning} | plain | {"reasoning_content": reasoning}


@functools.lru_cache(maxsize=4)
def compiled(template: str, now: dt.datetime | None) -> Any:
    """Compile a template in a sandbox: it cannot reach Python, nor change its arguments."""
    from jinja2 import TemplateError, nodes
    from jinja2.exceptions import SecurityError
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from jinja2.utils import Namespace

    class GenerationBlock(Extension):
        """`{% generation %}` writes its body; names set in it end with it, as in a call block."""

        tags = {"generation"}  # noqa: RUF012 - the attribute that Jinja reads

        def parse(self, parser: Any) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("write"), [], [], body).set_lineno(line)

        def write(self, caller: Any) -> str:
            return caller()

    class PlainNamespace(Namespace):
        """A namespace that keeps no names of Python's own: they would lead out of the sandbox."""

        def __setitem__(self, name: str, value: Any) -> None:
            if name.startswith("_"):
                raise SecurityError(f"a namespace keeps no name that begins with an underscore: {name}")
            super().__setitem__(name, value)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def strftime_now(form: str) -> str:
        return (now or dt.datetime.now()).strftime(form)  # the local time, without its zone

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, "jinja2.ext.loopcontrols"]
    )
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    environment.globals["namespace"] = PlainNamespace
    environment.filters["tojson"] = tojson
    return environment.from_string(template)
