"""Ids, prompts and streamed text are those of transformers, over a checkpoint and over what export makes of it."""

import datetime as dt
import itertools
import json
import shutil
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from click.testing import CliRunner

from tests.conftest import make_recipe, save_tiny
from tests.odd_tokenizers import (
    CASES,
    ROWS,
    TEMPLATE,
    TOOL,
    holes,
    llama_class_over_metaspace,
    tokens_in_every_file_at_once,
    write,
    write_json,
)
from toolchain.artifact import hash_file
from toolchain.cli import dtool
from toolchain.errors import DtoolError
from toolchain.export.stage import export_checkpoint
from toolchain.runners import generate as generating
from toolchain.runners.generate import stream_text
from toolchain.text import load_tokenizer, read_texts

MESSAGES = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": f"{TOOL} n't é"}]
TEXTS = [
    "the cat",
    " the  cat",
    "",
    "   ",
    "the cat\n\n the cat .",
    f"a{TOOL}b",
    f" a {TOOL} b",
    f"{TOOL}{TOOL} the c{TOOL}",
    "two words cat cats<n><|more|>",
    "a</s>b<pad>",
    "é模型🙂 a ' b n't , 's !",
    "<0x41> ▁the",
]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    """A tiny model with more rows than any of the tokenizers has tokens."""
    folder = tmp_path_factory.mktemp("odd") / "model"
    save_tiny(folder, vocab_size=ROWS)
    return folder


@pytest.fixture
def make_checkpoint(model_folder, tmp_path):
    def make(write_files, name="m"):
        folder = tmp_path / name
        shutil.copytree(model_folder, folder)
        write_files(folder)
        return folder

    return make


def export(folder, out):
    export_checkpoint(folder, make_recipe(), out, report=lambda _: None)
    return out


def theirs_of(folder):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


@pytest.fixture(params=CASES, ids=lambda case: case.__name__)
def case(request, make_checkpoint, tmp_path):
    """One tokenizer: as transformers reads the checkpoint, as we do, and as we read its export."""
    folder = make_checkpoint(request.param)
    artifact = export(folder, tmp_path / "x")
    ours = {"checkpoint": load_tokenizer(folder), "artifact": load_tokenizer(artifact)}
    assert ours["artifact"].loaded is None
    return SimpleNamespace(folder=folder, artifact=artifact, theirs=theirs_of(folder), ours=ours)


def random_sequences(tokenizer, count=100):
    """Ids that no text encodes to: runs of bytes that stop inside a character, special tokens between them."""
    rng = np.random.default_rng(0)
    ids, words = tokenizer.ids, tokenizer.encode_plain("".join(TEXTS))
    for length in rng.integers(1, 30, count):
        yield rng.choice(ids, length).tolist()
        yield rng.choice(words, length).tolist()
    yield rng.choice(words, 500).tolist()
    text = "é模型🙂"
    for end in range(1, len(text.encode()) + 1):
        yield list(range(end))


def check_stream(tokenizer, ids, whole):
    pieces = list(stream_text(iter(ids), tokenizer.decode, tokenizer.settler()))
    assert "".join(pieces) == whole
    assert not any(piece.endswith("\N{REPLACEMENT CHARACTER}") for piece in pieces[:-1])


def test_ids_text_and_prompts_are_those_of_transformers(case):
    for name, ours in case.ours.items():
        assert ours.ids == sorted(set(case.theirs.get_vocab().values())), name
        for text in TEXTS:
            plain = case.theirs.encode(text, add_special_tokens=False)
            assert ours.encode_plain(text) == plain, (name, text)
            # transformers puts start tokens in front of those that are there; ours are there once
            if not ours.start_ids or tuple(plain[: len(ours.start_ids)]) != ours.start_ids:
                assert ours.encode(text) == case.theirs(text).input_ids, (name, text)
            check_stream(ours, plain, case.theirs.decode(plain, skip_special_tokens=True))
        prompt = case.theirs.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
        assert ours.render_chat(MESSAGES) == prompt, name
        assert ours.eos_ids[0] == case.theirs.eos_token_id, name


@pytest.mark.parametrize("context", [1, 2, 64])
def test_streamed_pieces_of_any_ids_are_the_text_of_transformers(case, context, monkeypatch):
    monkeypatch.setattr(generating, "CONTEXT", context)
    for name, ours in case.ours.items():
        for ids in random_sequences(ours):
            whole = case.theirs.decode(ids, skip_special_tokens=True)
            assert ours.decode(ids) == whole, (name, ids)
            check_stream(ours, ids, whole)


def test_the_tokenizer_of_an_artifact_is_read_by_transformers_with_the_same_ids(case):
    again = theirs_of(case.artifact / "tokenizer")
    for text in TEXTS:
        assert again(text).input_ids == case.theirs(text).input_ids, text


def test_byte_tokens_wait_for_the_end_of_their_run(make_checkpoint):
    tokenizer = load_tokenizer(make_checkpoint(llama_class_over_metaspace))
    tokens = tokenizer.backend.token_to_id
    the, first, *rest = tokens("▁the"), *(tokens(f"<0x{byte:02X}>") for byte in "模".encode())
    for ids in (
        [the, first, *rest, the],
        [the, first, *rest],
        [the, first, *rest, first],  # the decoder takes the whole run for bytes that are no text
        [the, first, *rest, first, the],
        [the, first, *rest, tokens("</s>"), first],
        [the, first],
        [first, rest[0], the],
    ):
        check_stream(tokenizer, ids, tokenizer.loaded.decode(ids, skip_special_tokens=True))
    assert list(stream_text(iter([the, the]), tokenizer.decode, tokenizer.settler())) == ["the", " the"]


def test_an_exported_tokenizer_is_the_same_bytes_from_another_place(make_checkpoint, tmp_path):
    digests = []
    for name in ("m", "elsewhere"):
        folder = make_checkpoint(holes, name)
        artifact = export(folder, tmp_path / f"x-{name}")
        files = sorted(path for path in (artifact / "tokenizer").rglob("*") if path.is_file())
        assert not any(str(tmp_path) in path.read_text("utf-8") for path in files)
        digests.append({path.name: hash_file(path) for path in files})
        digests[-1]["manifest"] = hash_file(artifact / "manifest.json")
    assert digests[0] == digests[1]


@pytest.mark.parametrize("name", ["added_tokens.json", "chat_templates/tool_use.jinja"])
def test_every_file_of_a_tokenizer_is_in_the_lineage(make_checkpoint, tmp_path, name):
    folder = make_checkpoint(write)
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text("{}", "utf-8")
    manifest = json.loads((export(folder, tmp_path / "x") / "manifest.json").read_text())
    assert manifest["lineage"][f"checkpoint.{name}"] == hash_file(folder / name)


def test_an_artifact_is_read_without_transformers_and_torch(make_checkpoint, tmp_path):
    artifact = export(make_checkpoint(holes), tmp_path / "x")
    code = (
        "import sys; from pathlib import Path; from toolchain.text import load_tokenizer;"
        f"t = load_tokenizer(Path({str(artifact)!r})); t.encode_chat([{{'role': 'user', 'content': 'a'}}]);"
        "print({'torch', 'transformers'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def generate(path, *options):
    result = CliRunner().invoke(dtool, ["generate", str(path), "-p", "a", "-n", "12", "--json", *options])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout.splitlines()[-1])


def follow(folder, chain, other=()):
    """Overwrite the model: after each token of a chain comes the next, whatever stood before, or else `other`'s."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    embedding = torch.nn.functional.normalize(torch.randn(ROWS, 64, generator=torch.Generator().manual_seed(0)))
    head = torch.zeros(ROWS, 64)
    for weight, tokens in ((5, chain), (2, other)):
        for token, following in itertools.pairwise(tokens):
            head[following] += weight * embedding[token]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "o_proj" in name or "down_proj" in name:
                parameter.zero_()
        model.model.norm.weight.fill_(1)
        model.model.embed_tokens.weight.copy_(embedding)
        model.lm_head.weight.copy_(head)
    model.save_pretrained(folder)


def test_an_end_token_above_the_number_of_tokens_ends_the_text(make_checkpoint, tmp_path):
    folder = make_checkpoint(holes)
    chain = [*load_tokenizer(folder).encode_plain("abcd"), 290]
    follow(folder, chain)
    for path in (folder, export(folder, tmp_path / "x")):
        assert generate(path) == {"text": "bcd", "finish": "stop", "prompt_tokens": 1}


@pytest.mark.parametrize("end", ["config.json", "generation_config.json", "tokenizer_config.json"])
def test_the_end_tokens_of_three_files_all_end_a_text(make_checkpoint, tmp_path, end):
    folder = make_checkpoint(write)
    ends = {"config.json": 300, "generation_config.json": 301, "tokenizer_config.json": 2}
    ids = load_tokenizer(folder).encode_plain("abc")
    follow(folder, [*ids, ends[end]])
    config = json.loads((folder / "config.json").read_text())
    write_json(folder / "config.json", config | {"eos_token_id": [300, 5]})
    write_json(folder / "generation_config.json", {"eos_token_id": [301, 6]})
    for path in (folder, export(folder, tmp_path / "x")):
        assert generate(path) == {"text": "bc", "finish": "stop", "prompt_tokens": 1}


def test_a_row_without_a_token_is_never_chosen(make_checkpoint, tmp_path):
    folder = make_checkpoint(holes)
    tokenizer = load_tokenizer(folder)
    a, b, c = tokenizer.encode_plain("abc")
    follow(folder, [a, b, 270], [b, c, 290])  # 270 is a hole
    for path in (folder, export(folder, tmp_path / "x")):
        for options in ((), ("--temperature", "0.01", "--top-k", "3")):
            assert generate(path, *options) == {"text": "bc", "finish": "stop", "prompt_tokens": 1}
    assert tokenizer.allowed_ids(ROWS, tokenizer.eos_ids) == [*range(259), 290]
    assert tokenizer.allowed_ids(200, (150, 350, -1)) == [*range(200)]


GENERATION = """
{%- for m in messages %}
  {%- if m.role == 'assistant' %}
    {%- generation %} {{ m.content }}{% set x = 1 %}{{ loop.index }} {% endgeneration %}
  {%- else %}{{ m.content }}{% endif %}
{% endfor %}{{ x is defined }}"""
CONTROLS = """
{%- for m in messages %}
{% if loop.first %}{% continue %}{% endif %}{{ m.content }}{% break %}
{% endfor %}"""
SORTED = "{{ {'b': '<é', 'a': [1]} | tojson(sort_keys=true, separators=(',', ':'), ensure_ascii=true) }}"
COUNTED = "{% set ns = namespace(a=1) %}{% for m in messages %}{% set ns.a = ns.a + 1 %}{% endfor %}{{ ns.a }}"
LAYOUTS = {
    "plain": TEMPLATE,
    "generation": GENERATION,
    "no tools": "{% if tools is not none %}[TOOLS]{% endif %}{{ tools }}{{ documents }}{{ documents is defined }}",
    "json": "{{ messages | tojson }}{{ messages | tojson(indent=2) }}" + SORTED,
    "namespace": COUNTED,
    "dict": "{{ dict(a=1) }}{{ dict.fromkeys(['a'], 2) }}",
    "loop controls": CONTROLS,
    "the day": "{{ strftime_now('%d %B %Y%Z') }}",
    "reasoning": "{% for m in messages %}{{ m.reasoning_content }}|{{ m.thinking }}|{{ m.keys() | list }}{% endfor %}",
    "lines": "a\r\n  {% if true %}\r\nb\n{% endif %}\nc\n\n",
    "undefined": "{{ nothing }}{{ messages[0].nothing }}{{ messages[7] }}",
    "empty": "",
    "by name": {"default": TEMPLATE, "other": "x"},
    "in a list": [{"name": "other", "template": "x"}, {"name": "default", "template": TEMPLATE}],
}
CONVERSATIONS = [
    MESSAGES,
    [{"role": "user", "content": "hi", "tool_calls": None, "thinking": "hm"}],
    [{"role": "system", "content": "<é"}, {"role": "user", "content": "", "reasoning": "r", "thinking": "t"}],
]


@pytest.mark.parametrize("name", LAYOUTS)
def test_conversations_are_laid_out_as_transformers_does(make_checkpoint, tmp_path, name):
    folder = make_checkpoint(lambda folder: write(folder, chat_template=LAYOUTS[name]))
    theirs, artifact = theirs_of(folder), export(folder, tmp_path / "x")
    for messages in CONVERSATIONS:
        for begins in (True, False):
            expected = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=begins)
            for ours in (load_tokenizer(folder), load_tokenizer(artifact)):
                assert ours.render_chat(messages, add_generation_prompt=begins) == expected
                now = dt.datetime.now()
                assert ours.render_chat(messages, add_generation_prompt=begins, now=now) == expected


FAULTY = {
    "division": "{{ 1 / 0 }}",
    "value error": "{{ 'abc'.index('z') }}",
    "recursion": "{% macro r(n) %}{{ r(n + 1) }}{% endmacro %}{{ r(0) }}",
    "syntax": "{% for %}",
    "unknown filter": "{{ messages | nothing }}",
    "attribute of nothing": "{{ nothing.at.all }}",
    "python": "{{ messages.__class__.__mro__ }}",
    "names of Python's own": "{% set ns = namespace() %}{% set ns.__init__ = 1 %}",
    "too large": "{{ 'a' * 10 ** 15 }}",
    "no default": [{"name": "tool_use", "template": "x"}],
}


@pytest.mark.parametrize("name", FAULTY)
def test_a_faulty_template_is_an_error_of_the_template(make_checkpoint, tmp_path, name):
    folder = make_checkpoint(lambda folder: write(folder, chat_template=FAULTY[name]))
    with pytest.raises(Exception):  # noqa: B017, PT011 - theirs has no kind of its own
        theirs_of(folder).apply_chat_template(MESSAGES, tokenize=False)
    for path in (folder, export(folder, tmp_path / "x")):
        with pytest.raises(DtoolError, match="chat template"):
            load_tokenizer(path).render_chat(MESSAGES)
    result = CliRunner().invoke(dtool, ["generate", str(folder), "-p", "a", "--chat"])
    assert isinstance(result.exception, DtoolError)


def malformed_list(folder):
    write(folder, chat_template=[{"nam": "default", "template": "x"}])


def template_that_is_a_number(folder):
    write(folder, chat_template=5)


def template_in_latin_1(folder):
    write(folder)
    (folder / "chat_template.jinja").write_bytes(b"{{ messages[0].content }}\xe9")


def vocabulary_that_is_none(folder):
    write(folder)
    (folder / "tokenizer.json").write_text("{}")


def tokens_that_are_none(folder):
    write(folder, added_tokens_decoder={"1": 5})


def class_with_remote_code(folder):
    write(folder, tokenizer_class="MyTokenizer", auto_map={"AutoTokenizer": ["my.MyTokenizer", None]})
    (folder / "my.py").write_text("raise SystemExit('remote code ran')")


@pytest.mark.parametrize(
    "files",
    [malformed_list, template_that_is_a_number, template_in_latin_1, vocabulary_that_is_none, tokens_that_are_none,
     class_with_remote_code],
)  # fmt: skip
def test_a_tokenizer_that_cannot_be_read_is_refused_before_weights_are(make_checkpoint, tmp_path, files):
    folder = make_checkpoint(files)
    with pytest.raises(DtoolError, match=r"tokenizer|template"):
        load_tokenizer(folder)
    with pytest.raises(DtoolError, match=r"tokenizer|template"):
        export(folder, tmp_path / "x")
    assert not list(tmp_path.glob("*x*"))


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "added_tokens.json", "config.json"])
def test_a_byte_order_mark_in_front_of_a_file_changes_nothing(make_checkpoint, name):
    folder = make_checkpoint(tokens_in_every_file_at_once)
    before = load_tokenizer(folder)
    (folder / name).write_bytes(b"\xef\xbb\xbf" + (folder / name).read_bytes())
    after = load_tokenizer(folder)
    assert after.conventions == before.conventions
    assert after.encode(f"a{TOOL}b<|json|>") == before.encode(f"a{TOOL}b<|json|>")
    assert after.render_chat(MESSAGES) == before.render_chat(MESSAGES)


def test_a_day_in_calibration_text_is_always_the_same(make_checkpoint, tmp_path):
    folder = make_checkpoint(lambda folder: write(folder, chat_template="{{ strftime_now('%Y-%m-%d%Z') }}"))
    path = tmp_path / "text.jsonl"
    write_json(path, {"text": "a"})
    for source in (folder, export(folder, tmp_path / "x")):
        assert read_texts(path, load_tokenizer(source))[0].text == "2025-01-01"
