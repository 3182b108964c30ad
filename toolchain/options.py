"""Options that commands share, and how their results and progress are printed.

Heavy imports stand inside the functions, so that `dtool --help` is instant.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import click

FOLDER = click.Path(path_type=Path)
RECIPE = click.option("-r", "--recipe", "recipe_name", required=True, help="A recipe's path, or its name in recipes/.")
SET = click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a value of the recipe.")
OUT = click.option("-o", "--out", required=True, type=FOLDER, help="The folder to write; it must not exist.")
FORCE = click.option("--force", is_flag=True, help="Replace an artifact at the output path.")
MODEL = click.option("-m", "--model", help="The checkpoint (folder, .gguf or hub name), for the eager reference.")
STATISTICS = click.option(
    "--statistics", type=FOLDER, metavar="DIR", help="Keep what calibration sees here, for other recipes to reuse."
)
JSON = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON on stdout.")
PLUGINS = click.option(
    "--plugin-library",
    "plugin_libraries",
    multiple=True,
    type=FOLDER,
    help="A library of TensorRT plugins to register; it travels with the engine. May be repeated.",
)


def _check_page(_context: click.Context, _parameter: click.Parameter, path: Path | None) -> Path | None:
    """Refuse a page that would replace something else or spoil an artifact, before any work."""
    if path is not None:
        from toolchain.artifact import check_page

        check_page(path)
    return path


HTML = click.option("--html", type=FOLDER, callback=_check_page, help="Also write the report as one HTML page.")


def say(line: str) -> None:
    """Progress goes to stderr, so that stdout holds results alone."""
    click.echo(line, err=True)


def load(name: str, overrides: Iterable[str], *stages: str, tried: Iterable[str] = ()) -> Any:
    """The recipe a command was given; what of it does nothing in these stages is told (`Recipe.idle`)."""
    from toolchain.recipe import load_recipe

    recipe = load_recipe(name, overrides)
    for line in recipe.idle(stages, tried):
        say(f"note: {line}")
    return recipe


def show(document: Any, page: Callable[[], Any], *, as_json: bool, html: Path | None) -> None:
    """Print a result as JSON or as text, and write its page where one was asked for."""
    from toolchain.artifact import dump_json, write_atomic
    from toolchain.report import render_html, render_text

    if html is not None:
        write_atomic(html, render_html(page()).encode())
    click.echo(dump_json(document) if as_json else render_text(page()), nl=False)
