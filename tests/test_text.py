import datetime as dt
import json
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toolchain.errors import DtoolError
from toolchain.text import Passage, has_tokenizer, load_tokenizer, read_texts, token_blocks

LETTERS = "abcdefghijklmnopqrstuvwxyz "
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'robot' %}{{ raise_exception('no robots') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture
def make_tokenizer(tmp_path):
    """make_tokenizer(folder name, post_processor_adds_start, **config): one token per character."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors

    def make(name="tok", *, processor=False, **config):
        folder = tmp_path / name
        folder.mkdir(parents=True)
        vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {c: i for i, c in enumerate(LETTERS, 3)}
        tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
        tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
        if processor:
            tokenizer.post_processor = processors.TemplateProcessing(
                single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
            )
        tokenizer.save(str(folder / "tokenizer.json"))
        document = {"bos_token": {"content": "<s>"}, "eos_token": "</s>"} | config
        (folder / "tokenizer_config.json").write_text(json.dumps(document))
        return folder

    return make


def ids_of(text):
    return [LETTERS.index(c) + 3 for c in text]


def test_start_token_comes_once(make_tokenizer):
    tokenizer = load_tokenizer(make_tokenizer(processor=True))
    assert tokenizer.encode("ab") == [1, *ids_of("ab")]
    assert tokenizer.encode("<s>ab") == [1, *ids_of("ab")]


def test_start_token_comes_from_the_post_processor_when_the_config_is_silent(make_tokenizer):
    assert load_tokenizer(make_tokenizer("a", processor=True)).encode("ab") == [1, *ids_of("ab")]
    assert load_tokenizer(make_tokenizer("b", processor=False)).encode("ab") == ids_of("ab")


@pytest.mark.parametrize("processor", [True, False])
def test_where_config_and_post_processor_disagree_ids_are_those_of_transformers_and_it_is_told(
    make_tokenizer, processor
):
    from transformers import AutoTokenizer

    folder = make_tokenizer(
        processor=processor, add_bos_token=not processor, tokenizer_class="PreTrainedTokenizerFast", bos_token="<s>"
    )
    theirs = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    ours = load_tokenizer(folder)
    assert ours.encode("ab") == theirs("ab").input_ids
    assert f"add_bos_token={str(not processor).lower()}" in ours.notes[0]
    agreed = make_tokenizer("agreed", processor=processor, add_bos_token=processor)
    assert load_tokenizer(agreed).notes == ()


@pytest.mark.parametrize("processor", [True, False])
def test_chat_has_exactly_one_start_token(make_tokenizer, processor):
    folder = make_tokenizer(processor=processor, add_bos_token=True, chat_template=TEMPLATE)
    ids = load_tokenizer(folder).encode_chat([{"role": "user", "content": "hello"}])
    assert ids[0] == 1
    assert ids.count(1) == 1


def test_chat_template_knows_the_generation_prompt(make_tokenizer):
    tokenizer = load_tokenizer(make_tokenizer(chat_template=TEMPLATE))
    messages = [{"role": "user", "content": "hi"}]
    assert tokenizer.render_chat(messages) == "<s>[user]hi[assistant]"
    assert tokenizer.render_chat(messages, add_generation_prompt=False) == "<s>[user]hi"


def test_the_template_file_comes_before_the_config(make_tokenizer):
    folder = make_tokenizer(chat_template="old")
    (folder / "chat_template.jinja").write_text("new {{ messages[0].content }}")
    assert load_tokenizer(folder).render_chat([{"role": "user", "content": "x"}]) == "new x"


def test_of_several_named_templates_the_default_is_taken(make_tokenizer):
    templates = [{"name": "tools", "template": "t"}, {"name": "default", "template": "d"}]
    assert load_tokenizer(make_tokenizer(chat_template=templates)).render_chat([]) == "d"


def test_a_template_that_refuses_says_why(make_tokenizer):
    tokenizer = load_tokenizer(make_tokenizer(chat_template=TEMPLATE))
    with pytest.raises(DtoolError, match="no robots"):
        tokenizer.render_chat([{"role": "robot", "content": "x"}])


def test_a_template_cannot_reach_python(make_tokenizer):
    folder = make_tokenizer(chat_template="{{ messages.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(DtoolError, match="refused"):
        load_tokenizer(folder).render_chat([])


def test_without_a_template_chat_is_refused(make_tokenizer):
    with pytest.raises(DtoolError, match="no chat template"):
        load_tokenizer(make_tokenizer()).render_chat([])


def test_an_artifacts_tokenizer_is_in_its_subfolder(make_tokenizer, tmp_path):
    make_tokenizer("artifact/tokenizer")
    assert has_tokenizer(tmp_path / "artifact")
    assert load_tokenizer(tmp_path / "artifact").encode("a") == ids_of("a")


def test_every_end_token_is_known(make_tokenizer):
    folder = make_tokenizer()
    (folder / "generation_config.json").write_text('{"eos_token_id": [5, 2, 7]}')
    tokenizer = load_tokenizer(folder)
    assert tokenizer.eos_ids == (2, 5, 7)
    assert tokenizer.eos_id == 2


@pytest.mark.parametrize("missing", ["tokenizer.json", "tokenizer_config.json"])
def test_missing_files_are_named_at_once(make_tokenizer, missing):
    folder = make_tokenizer()
    (folder / missing).unlink()
    start = time.perf_counter()
    with pytest.raises(DtoolError, match=missing):
        load_tokenizer(folder)
    assert time.perf_counter() - start < 2


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(DtoolError, match="no such folder"):
        load_tokenizer(tmp_path / "nowhere")


DAMAGED = [("tokenizer.json", "{}"), ("tokenizer_config.json", "{"), ("tokenizer_config.json", "[]")]


@pytest.mark.parametrize(("name", "text"), DAMAGED)
def test_damaged_files_are_named(make_tokenizer, name, text):
    folder = make_tokenizer()
    (folder / name).write_text(text)
    with pytest.raises(DtoolError, match=name):
        load_tokenizer(folder)


def test_a_start_token_outside_the_vocabulary_is_refused(make_tokenizer):
    with pytest.raises(DtoolError, match="bos_token '<begin>' is not in the vocabulary"):
        load_tokenizer(make_tokenizer(bos_token="<begin>"))


def write(tmp_path, text):
    path = tmp_path / "text.jsonl"
    path.write_text(text, "utf-8")
    return path


def test_texts_are_read_line_by_line(tmp_path):
    path = write(tmp_path, '{"text": "a", "kind": "code", "source": "s"}\n{"text": "\u2028b"}\n')
    assert read_texts(path) == [Passage("a", "code", "s"), Passage("\u2028b", "text", "")]


BAD_LINES = ["", "{", "[1]", '{"text": 3}', '{"text": " "}', '{"text": "a", "kind": 1}', '{"body": "a"}']


@pytest.mark.parametrize("bad", BAD_LINES)
def test_a_bad_line_is_named_by_its_number(tmp_path, bad):
    path = write(tmp_path, f'{{"text": "a"}}\n{bad}\n{{"text": "b"}}\n')
    with pytest.raises(DtoolError, match="line 2 is not a passage"):
        read_texts(path)


def test_a_byte_order_mark_in_front_of_texts_is_no_text(tmp_path):
    path = tmp_path / "text.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "a"}\n')
    assert read_texts(path) == [Passage("a", "text", "")]


def test_json_nested_too_deeply_is_named_by_its_line(tmp_path):
    deep = '{"text": "a", "x": ' + "[" * 100_000 + "]" * 100_000 + "}"
    with pytest.raises(DtoolError, match="line 2 is not a passage") as refusal:
        read_texts(write(tmp_path, f'{{"text": "a"}}\n{deep}\n'))
    assert "nested" in refusal.value.found


def test_empty_missing_and_binary_files_are_refused(tmp_path):
    with pytest.raises(DtoolError, match="is empty"):
        read_texts(write(tmp_path, ""))
    with pytest.raises(DtoolError, match="cannot be read"):
        read_texts(tmp_path / "none.jsonl")
    (tmp_path / "b.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DtoolError, match="cannot be read"):
        read_texts(tmp_path / "b.jsonl")


def chats(make_tokenizer, tmp_path, *lines, **config):
    tokenizer = load_tokenizer(make_tokenizer(**{"processor": True, "chat_template": TEMPLATE} | config))
    path = write(tmp_path, "".join(json.dumps(line) + "\n" for line in lines))
    return tokenizer, path


def test_conversations_are_laid_out_as_generate_does(make_tokenizer, tmp_path):
    said = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    lines = {"text": "a b", "kind": "code"}, {"messages": said[:1]}, {"messages": said, "source": "s"}
    tokenizer, path = chats(make_tokenizer, tmp_path, *lines)
    asked, single, whole = read_texts(path, tokenizer)
    assert asked == Passage(tokenizer.render_chat([{"role": "user", "content": "a b"}]), "code", "")
    assert single.text == "<s>[user]hi[assistant]"
    assert whole == Passage("<s>[user]hi[assistant]ho", "text", "s")  # answered: no turn begins


def test_conversations_are_packed_without_padding_and_with_one_start_token_a_block(make_tokenizer, tmp_path):
    tokenizer, path = chats(make_tokenizer, tmp_path, *[{"text": "abc"}] * 9, pad_token="<unk>")
    blocks = token_blocks(read_texts(path, tokenizer), tokenizer, blocks=4, seq_len=20, seed=0)
    assert (blocks[:, 0] == 1).all()
    assert (blocks[:, 1:] != 1).all()
    one = [*tokenizer.encode_plain("[user]abc[assistant]"), 2]
    assert blocks[:, 1:].flatten().tolist() == (one * 9)[: 4 * 19]
    assert blocks.shape == (4, 20)
    with pytest.raises(DtoolError, match="too short"):
        token_blocks(read_texts(path, tokenizer), tokenizer, blocks=40, seq_len=20, seed=0)


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ({"messages": []}, "an empty one"),
        ({"messages": "hi"}, "no list"),
        ({"messages": [{"role": "user"}]}, "without a role or a content"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "no robots"),
        ({"body": "x"}, 'no "text"'),
    ],
)
def test_a_line_that_is_no_conversation_is_named(make_tokenizer, tmp_path, line, found):
    tokenizer, path = chats(make_tokenizer, tmp_path, {"text": "a"}, line)
    with pytest.raises(DtoolError, match="line 2 is not a conversation") as refusal:
        read_texts(path, tokenizer)
    assert found in refusal.value.found
    assert "messages" in refusal.value.expected


def test_messages_without_chat_and_chat_without_a_template_are_refused(make_tokenizer, tmp_path):
    tokenizer, path = chats(make_tokenizer, tmp_path, {"messages": []}, chat_template=None)
    with pytest.raises(DtoolError, match=r"calibration\.chat = true"):
        read_texts(path)
    with pytest.raises(DtoolError, match="has no chat template") as refusal:
        read_texts(path, tokenizer)
    assert "calibration.chat=false" in refusal.value.fix


def test_a_template_that_tells_the_day_gives_the_same_text_on_every_day(make_tokenizer, tmp_path):
    template = "{{ strftime_now('%Y-%m-%d') }} {{ messages[0].content }}"
    tokenizer, path = chats(make_tokenizer, tmp_path, {"text": "a"}, chat_template=template)
    assert read_texts(path, tokenizer)[0].text == "2025-01-01 a"
    today = tokenizer.render_chat([{"role": "user", "content": "a"}])
    assert today == f"{dt.datetime.now().astimezone():%Y-%m-%d} a"


def passages(kind, letter, sizes):
    return [Passage(letter * size, kind, "") for size in sizes]


def test_blocks_take_the_kinds_in_turn(make_tokenizer):
    tokenizer = load_tokenizer(make_tokenizer())
    texts = passages("code", "a", [100]) + passages("prose", "b", [25])
    blocks = token_blocks(texts, tokenizer, blocks=6, seq_len=10, seed=0)
    a, b = ids_of("ab")
    assert blocks.dtype == np.int64
    assert [row[0] for row in blocks] == [a, b, a, b, a, a]


def test_documents_are_packed_with_end_tokens_between(make_tokenizer):
    tokenizer = load_tokenizer(make_tokenizer())
    (block,) = token_blocks(passages("x", "a", [3, 3, 3]), tokenizer, blocks=1, seq_len=11, seed=0)
    assert block.tolist() == [*ids_of("aaa"), 2, *ids_of("aaa"), 2, *ids_of("aaa")]


def test_every_block_starts_with_the_start_token_of_a_tokenizer_that_has_one(make_tokenizer):
    tokenizer = load_tokenizer(make_tokenizer(processor=True))
    blocks = token_blocks(passages("x", "a", [50]), tokenizer, blocks=4, seq_len=8, seed=0)
    assert (blocks[:, 0] == 1).all()
    assert (blocks[:, 1:] != 1).all()


def test_kinds_shorter_than_a_block_share_one(make_tokenizer):
    tokenizer = load_tokenizer(make_tokenizer())
    texts = passages("long", "a", [40]) + passages("s1", "b", [6]) + passages("s2", "c", [6])
    blocks = token_blocks(texts, tokenizer, blocks=3, seq_len=10, seed=0)
    assert set(ids_of("bc")) <= set(blocks[1].tolist())


def test_too_short_a_text_says_how_many_blocks_it_gives(make_tokenizer):
    tokenizer = load_tokenizer(make_tokenizer())
    with pytest.raises(DtoolError, match="gives 3 blocks of 10 tokens"):
        token_blocks(passages("x", "a", [35]), tokenizer, blocks=4, seq_len=10, seed=0)


@settings(max_examples=25, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 60)), min_size=1, max_size=12),
    blocks=st.integers(1, 5),
    seq_len=st.integers(2, 20),
    seed=st.integers(0, 5),
)
def test_blocks_are_full_repeatable_or_refused(character_tokenizer, sizes, blocks, seq_len, seed):
    texts = [Passage(letter * size, letter, "") for letter, size in sizes]
    options = {"blocks": blocks, "seq_len": seq_len, "seed": seed}
    try:
        first = token_blocks(texts, character_tokenizer, **options)
    except DtoolError:
        assert sum(size for _, size in sizes) // seq_len < blocks + 4
        return
    assert first.shape == (blocks, seq_len)
    assert (first == token_blocks(texts, character_tokenizer, **options)).all()
    assert first.min() >= 2
    assert set(first.flat) <= set(character_tokenizer.ids)


@pytest.fixture(scope="module")
def character_tokenizer(tmp_path_factory):
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("characters")
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {c: i for i, c in enumerate(LETTERS, 3)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}')
    return load_tokenizer(folder)
