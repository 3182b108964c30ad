"""Chat templates: Jinja as models are published with it, in a sandbox."""

import datetime as dt
import functools
import json
from collections.abc import Callable
from typing import Any


@functools.lru_cache(maxsize=4)
def compiled(template: str, now: dt.datetime | None) -> Any:
    """Jinja as the templates are written for: trimmed blocks, break and continue, no access to Python."""
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def strftime_now(form: str) -> str:
        return (now or dt.datetime.now().astimezone()).strftime(form)

    def tojson(value: Any, indent: int | None = None) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    helpers: dict[str, Callable[..., Any]] = {"raise_exception": raise_exception, "strftime_now": strftime_now}
    environment.globals.update(helpers)
    environment.filters["tojson"] = tojson
    return environment.from_string(template)
