"""Options that commands share, and how their results and progress are printed.

Heavy imports stand inside the functions, so that `dtool --help` is instant.
"""

import functools
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import click

from toolchain.errors import DtoolError
from toolchain.option_types import FOLDER, NAME

RECIPE = click.option(
    "-r", "--recipe", "recipe_name", type=NAME, required=True, help="A recipe's path, or its name in recipes/."
)
SET = click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a value of the recipe.")
OUT = click.option("-o", "--out", required=True, type=FOLDER, help="The folder to write; it must not exist.")
FORCE = click.option("--force", is_flag=True, help="Replace an artifact at the output path.")
MODEL = click.option(
    "-m", "--model", type=NAME, help="The checkpoint (folder, .gguf or hub name), for the eager reference."
)
STATISTICS = click.option(
    "--statistics", type=FOLDER, metavar="DIR", help="Keep what calibration sees here, for other recipes to reuse."
)
JSON = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON on stdout.")
WRITTEN = {"out": "-o", "statistics": "--statistics"}
"""The arguments of commands that name what is written, and their options."""
PLUGINS = click.option(
    "--plugin-library",
    "plugin_libraries",
    multiple=True,
    type=FOLDER,
    help="A library of TensorRT plugins to register; it travels with the engine. May be repeated.",
)


def _check_page(page: Path, given: Mapping[str, Any]) -> None:
    """Refuse a page that would replace something else or spoil an artifact, before any work.

    That is also one that is, holds or lies in what the command writes beside it: `given` are its arguments by name.
    """
    from toolchain.artifact import check_page

    here = page.resolve()
    for name, option in WRITTEN.items():
        other = given.get(name)
        there = None if other is None else other.resolve()
        if there is not None and (here == there or here in there.parents or there in here.parents):
            raise DtoolError(
                f"--html and {option} are in each other's way",
                expected=f"a page that is not, does not hold and does not lie in {other}",
                found=f"--html {page}",
                fix="choose another path for --html",
            )
    check_page(page)


def HTML(command: Callable[..., None]) -> Callable[..., None]:  # noqa: N802 - an option as the others
    """`--html` for a command, its place checked before the command does anything."""

    @functools.wraps(command)
    def checked(**given: Any) -> None:
        if given["html"] is not None:
            _check_page(given["html"], given)
        command(**given)

    return click.option("--html", type=FOLDER, help="Also write the report as one HTML page.")(checked)


def say(line: str) -> None:
    """Progress goes to stderr, so that stdout holds results alone."""
    click.echo(line, err=True)


def load(name: str, overrides: Iterable[str], *stages: str, tried: Iterable[str] = ()) -> Any:
    """The recipe a command was given; what of it does nothing in these stages is told (`Recipe.idle`)."""
    from toolchain.memory import require_torch
    from toolchain.recipe import load_recipe

    recipe = load_recipe(name, overrides)
    for line in recipe.idle(stages, tried):
        say(f"note: {line}")
    require_torch()  # every command with a recipe imports it
    return recipe


def show(document: Any, page: Callable[[], Any], *, as_json: bool, html: Path | None) -> None:
    """Print a result as JSON or as text, and write its page where one was asked for."""
    from toolchain.artifact import dump_json, write_atomic
    from toolchain.report import render_html, render_text

    if html is not None:
        write_atomic(html, render_html(page()).encode())
    click.echo(dump_json(document, ascii_only=needs_ascii()) if as_json else render_text(page()), nl=False)


def needs_ascii() -> bool:
    """Whether JSON on stdout must be in ASCII: another encoding than Unicode's lacks characters, JSON escapes them."""
    return not str(sys.stdout.encoding).lower().startswith("utf")
