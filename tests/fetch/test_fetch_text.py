import re

from hypothesis import given
from hypothesis import strategies as st

from toolchain.fetch.text import DOCUMENT_CHARS, PARAGRAPH_CHARS, book_text, decode, html_text, split_documents

BOOK = """Some header
*** START OF THIS PROJECT GUTENBERG EBOOK X ***
p.772:0
First line of a para-
graph that goes on
to its end.

[[ed: a note]]
Second one, about the two- and
three-year plan.
*** END OF THIS PROJECT GUTENBERG EBOOK X ***
Licence
"""

PAGE = """<html><head><title>no</title></head><body><p id="title"><a href="x">no</a></p>
<ul class="docnav top"><li>no</li></ul><div class="toc"><ul><li>no</li></ul></div>
<h2>系统升级</h2><div class="para">
   命令 <code>apt</code> 很
   好用。<br />
</div><div class="para">This one was left in English 好.</div>
<pre>  a
    b</pre></body></html>"""


def test_a_book_is_its_paragraphs_without_wraps_header_or_marks():
    assert book_text(BOOK) == (
        "First line of a paragraph that goes on to its end.\n\nSecond one, about the two- and three-year plan."
    )


def test_a_book_without_blank_lines_breaks_at_short_lines_that_end_a_sentence():
    full = "a line that is as long as the lines of a book commonly are, or so"
    assert book_text(f"{full}\nand its end.\n{full}\nshort and open\ndone!\n") == (
        f"{full} and its end.\n\n{full} short and open done!"
    )


def test_a_page_is_its_paragraphs_without_navigation():
    assert html_text(PAGE).split("\n\n") == [
        "系统升级",
        "命令 apt 很 好用。",
        "This one was left in English 好.",
        "  a\n    b",
    ]


def test_a_chinese_page_has_no_untranslated_paragraph_and_no_stray_space():
    assert html_text(PAGE, chinese=True).split("\n\n") == ["系统升级", "命令 apt 很好用。"]


def test_decode_drops_the_mark_and_carriage_returns():
    assert decode(b"\xef\xbb\xbfa\r\nb") == "a\nb"


paragraphs = st.text(alphabet="ab .\n好。", min_size=1, max_size=400).filter(str.strip)


@given(st.lists(paragraphs, min_size=1, max_size=60))
def test_documents_hold_all_of_the_text_in_order(parts):
    text = "\n\n".join(parts)
    documents = split_documents(text)
    squeeze = re.compile(r"\s+")
    assert squeeze.sub("", "".join(documents)) == squeeze.sub("", text)
    assert all(len(d) <= DOCUMENT_CHARS + 2 * PARAGRAPH_CHARS for d in documents)


def test_documents_are_of_an_even_length():
    text = "\n\n".join(f"Paragraph {i} " + "word " * (20 + i % 90) for i in range(200))
    lengths = [len(d) for d in split_documents(text)]
    assert min(lengths) >= 3000
    assert max(lengths) <= 6000


def test_blank_lines_of_source_code_are_kept():
    code = "def f():\n    pass\n\n\ndef g():\n    pass"
    assert split_documents(code) == [code]
