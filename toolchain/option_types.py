"""Types of arguments and options that name something: an empty one, as an unset variable gives, names nothing.

As a path it would be the current folder, which nobody means by it.
"""

import errno
from pathlib import Path
from typing import Any

import click


class _NotEmpty(click.ParamType):
    instead = ""
    """What else may be meant, as the message goes on."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The value as the type beside this one has it."""
        if value == "":
            self.fail("it is empty: name something" + self.instead, param, ctx)
        return super().convert(value, param, ctx)


class _NamedPath(_NotEmpty, click.Path):
    instead = ", or '.' for the current folder"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The path, which need not exist; links that lead in a circle lead nowhere."""
        path = super().convert(value, param, ctx)
        try:
            path.stat()
        except OSError as error:
            if error.errno == errno.ELOOP:
                self.fail(f"{path} is a link that leads back to itself", param, ctx)
        return path


class _Name(_NotEmpty, click.types.StringParamType):
    pass


FOLDER, NAME = _NamedPath(path_type=Path), _Name()
"""A path; and what may be one, or a name of something else."""
