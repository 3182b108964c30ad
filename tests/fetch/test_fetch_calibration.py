import hashlib
import io
import json
import tarfile
import zipfile
from collections import Counter

import pytest

from toolchain.errors import DtoolError
from toolchain.fetch.archives import read_members
from toolchain.fetch.calibration import SOURCES, fetch_calibration, read_sources


def tar_of(files, mode):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def deb_of(files):
    def member(name, content):
        header = f"{name:<16}{0:<12}{0:<6}{0:<6}{'100644':<8}{len(content):<10}`\n".encode()
        return header + content + b"\n" * (len(content) % 2)

    data = tar_of({f"./{name}": content for name, content in files.items()}, "w:xz")
    return b"!<arch>\n" + member("debian-binary", b"2.0") + member("data.tar.xz", data)


def wheel_of(files):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def prose(seed, count):
    return "\n\n".join(f"Sentence {seed} {i}. " + "Words follow words. " * 12 for i in range(count)).encode()


PAGE = "".join(f"<p>第{i}段：这里是一段用来测试的中文文字，没有别的意思。</p>" for i in range(60)).encode()  # noqa: RUF001
ARCHIVES = {
    "book-1.tar.gz": tar_of({"book-1/a.txt": prose("a", 90), "book-1/b.txt": prose("b", 60)}, "w:gz"),
    "code-1-py3-none-any.whl": wheel_of({"code.py": b"def f():\n    return 1\n" * 300}),
    "zh_1_all.deb": deb_of({"usr/zh.html": PAGE}),
}
TEXTS = {
    "a": ("prose", "calibration", "book", "book-1/a.txt", "plain"),
    "code": ("code", "calibration", "code", "code.py", "plain"),
    "b": ("prose", "evaluation", "book", "book-1/b.txt", "plain"),
    "zh": ("chinese", "evaluation", "zh", "usr/zh.html", "html-chinese"),
}


def write_sources(path, result="", extra=""):
    lines = []
    for filename, content in ARCHIVES.items():
        name = filename.replace("_", "-").split("-")[0]
        lines.append(f"[archives.{name}]\npackage = '{name}'\nversion = '1'\nfilename = '{filename}'\nlicense = 'MIT'")
        lines.append(f"sha256 = '{hashlib.sha256(content).hexdigest()}'")
        lines.append(f"method = '{'debian' if filename.endswith('deb') else 'pypi'}'")
    for name, (kind, split, archive, file, how) in TEXTS.items():
        lines.append(f"[[sources]]\nid = '{name}'\nkind = '{kind}'\nsplit = '{split}'\narchive = '{archive}'")
        lines.append(f"files = ['{file}']\nnormalise = '{how}'")
    path.write_text("\n".join([*lines, extra, result]))
    return path


@pytest.fixture
def sources(tmp_path, cache):
    for filename, content in ARCHIVES.items():
        folder = cache / (filename.replace("_", "-").split("-")[0] + "-1")
        folder.mkdir(parents=True)
        (folder / filename).write_bytes(content)
    return write_sources(tmp_path / "sources.toml")


def say(line):
    pass


def read(path):
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def test_every_line_has_its_text_kind_and_source(tmp_path, sources):
    paths = fetch_calibration(tmp_path / "out", report=say, sources=sources)
    calibration, evaluation = read(paths["calibration"]), read(paths["evaluation"])
    assert {(d["source"], d["kind"]) for d in calibration} == {("a", "prose"), ("code", "code")}
    assert {(d["source"], d["kind"]) for d in evaluation} == {("b", "prose"), ("zh", "chinese")}
    assert "第59段" in [d for d in evaluation if d["source"] == "zh"][-1]["text"]
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["calibration.jsonl", "evaluation.jsonl"]


def test_the_beginning_of_the_list_holds_every_source(tmp_path, sources):
    paths = fetch_calibration(tmp_path / "out", report=say, sources=sources)
    documents = [d["source"] for d in read(paths["calibration"])]
    counts = Counter(documents)
    half = Counter(documents[: len(documents) // 2])
    assert all(abs(half[name] - counts[name] / 2) <= 1 for name in counts)


def test_a_second_run_keeps_pinned_files_and_rebuilds_equal_bytes(tmp_path, sources):
    paths = fetch_calibration(tmp_path / "out", report=say, sources=sources)
    digests = {split: hashlib.sha256(path.read_bytes()).hexdigest() for split, path in paths.items()}
    pins = "[result]\n" + "\n".join(f"{split} = '{digest}'" for split, digest in digests.items())
    write_sources(sources, result=pins)
    paths["evaluation"].unlink()  # as after a run killed between the two
    fetch_calibration(tmp_path / "out", report=say, sources=sources)
    assert digests == {split: hashlib.sha256(path.read_bytes()).hexdigest() for split, path in paths.items()}


def test_text_of_another_origin_is_not_overwritten_unless_forced(tmp_path, sources):
    out = tmp_path / "out"
    out.mkdir()
    (out / "evaluation.jsonl").write_text("mine")
    with pytest.raises(DtoolError, match="already exists"):
        fetch_calibration(out, report=say, sources=sources)
    assert [p.name for p in out.iterdir()] == ["evaluation.jsonl"]
    fetch_calibration(out, force=True, report=say, sources=sources)
    assert read(out / "evaluation.jsonl")


def test_a_result_that_is_not_the_pinned_one_is_refused(tmp_path, sources):
    write_sources(sources, result=f"[result]\ncalibration = '{'0' * 64}'")
    with pytest.raises(DtoolError, match="0" * 64):
        fetch_calibration(tmp_path / "out", report=say, sources=sources)
    assert not (tmp_path / "out").exists()


def test_one_file_may_not_give_text_to_both_splits(tmp_path, sources):
    again = "[[sources]]\nid = 'x'\nkind = 'prose'\nsplit = 'evaluation'\narchive = 'book'\nfiles = ['book-1/a.txt']"
    with pytest.raises(DtoolError, match="must not overlap"):
        read_sources(write_sources(sources, extra=again))


def test_a_missing_member_is_named_with_a_near_one(tmp_path, cache):
    for filename, content in ARCHIVES.items():
        (tmp_path / filename).write_bytes(content)
    with pytest.raises(DtoolError, match=r"did you mean usr/zh\.html"):
        read_members(tmp_path / "zh_1_all.deb", ["usr/zn.html"])
    with pytest.raises(DtoolError, match=r"did you mean code\.py"):
        read_members(tmp_path / "code-1-py3-none-any.whl", ["code.pyc"])


@pytest.mark.parametrize("name", ["x.deb", "x.whl", "x.tar.gz"])
def test_a_damaged_archive_is_said_to_be_damaged(tmp_path, name):
    (tmp_path / name).write_bytes(b"!<arch>\ncut")
    with pytest.raises(DtoolError, match="is damaged"):
        read_members(tmp_path / name, ["a"])


def test_the_shipped_sources_cover_every_kind_in_both_splits():
    plan = read_sources(SOURCES)
    kinds = {split: {s.kind for s in plan.sources if s.split == split} for split in ("calibration", "evaluation")}
    assert kinds["calibration"] == kinds["evaluation"] == {"prose", "technical", "code", "chinese"}
    assert set(plan.result) == {"calibration", "evaluation"}
    assert {s.archive for s in plan.sources} == set(plan.archives)
