"""Plain paragraphs from books, HTML and source text, and documents of an even length from paragraphs."""

import html.parser
import math
import re

CJK = "\u3000-\u303f\u4e00-\u9fff\uff00-\uffef"
HAN = re.compile("[\u4e00-\u9fff]")
MIN_HAN_SHARE = 0.3
"""Share of Chinese characters below which a paragraph of a translation counts as left untranslated."""

FULL_LINE_CHARS = 55
"""In a book without blank lines, a line shorter than this that ends a sentence ends a paragraph."""

DOCUMENT_CHARS = 4500
PARAGRAPH_CHARS = 1500

NAVIGATION_CLASSES = {"docnav", "toc"}
SKIPPED_TAGS = {"script", "style", "head", "title"}
BLOCK_TAGS = {"p", "div", "li", "ul", "ol", "pre", "h1", "h2", "h3", "h4", "h5", "td", "th", "tr", "dt", "dd", "table"}
VOID_TAGS = {"img", "br", "hr", "meta", "link", "input", "col"}


def decode(content: bytes) -> str:
    """UTF-8 text with newline ends and without a byte order mark."""
    return content.decode("utf-8-sig").replace("\r\n", "\n")


def book_text(text: str) -> str:
    """A book's paragraphs, hard wraps re-flowed, one blank line between them.

    Project Gutenberg's header and licence, page marks and notes in double brackets are left out.
    """
    start = re.search(r"^\*\*\* ?START OF .*\n", text, re.MULTILINE)
    end = re.search(r"^(End of (the )?Project Gutenberg|\*\*\* ?END OF ).*$", text, re.MULTILINE)
    text = text[start.end() if start else 0 : end.start() if end else len(text)]
    text = re.sub(r"^(#{2,}.*|p\.\d+:\d+|\[\[.*\]\])$", "", text, flags=re.MULTILINE)
    blank_lines = "\n\n" in text.strip()
    paragraphs: list[list[str]] = [[]]
    for line in text.split("\n"):
        if line.strip():
            paragraphs[-1].append(line.strip())
        ends = re.search(r"[.?!:][\"']?$", line.rstrip()) or line.isupper()
        if not line.strip() or (not blank_lines and len(line) < FULL_LINE_CHARS and ends):
            paragraphs.append([])
    joined = "\n\n".join(" ".join(lines) for lines in paragraphs if lines)
    return re.sub(r"([a-z])- (?!and |or |to )([a-z])", r"\1\2", joined)  # words cut at a line's end


def html_text(page: str, *, chinese: bool = False) -> str:
    """The paragraphs of a page: navigation left out, white space collapsed outside of `pre`.

    With `chinese`, paragraphs that are mostly in another language are left out, and so are the
    spaces that line breaks left between Chinese characters.
    """
    reader = _PageText()
    reader.feed(page)
    reader.close()
    paragraphs = reader.finish()
    if chinese:
        paragraphs = [p for p in paragraphs if len(HAN.findall(p)) >= MIN_HAN_SHARE * len(p)]
        paragraphs = [re.sub(f"(?<=[{CJK}]) (?=[{CJK}])", "", p) for p in paragraphs]
    return "\n\n".join(paragraphs)


class _PageText(html.parser.HTMLParser):
    """Collects the text of block elements, skipping lists of navigation links."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.paragraphs: list[str] = []
        self.parts: list[str] = []
        self.open: list[tuple[str, bool]] = []
        """The open elements, each with whether its text is skipped."""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in VOID_TAGS:
            return
        if tag in BLOCK_TAGS and not self._in_pre():
            self._end_paragraph()
        names = dict(attrs)
        classes = (names.get("class") or "").split()
        navigation = not NAVIGATION_CLASSES.isdisjoint(classes) or names.get("id") in {"banner", "title"}
        skipped = tag in SKIPPED_TAGS or navigation or (bool(self.open) and self.open[-1][1])
        self.open.append((tag, skipped))

    def handle_endtag(self, tag: str) -> None:
        if tag not in [name for name, _ in self.open]:
            return
        if tag in BLOCK_TAGS:
            self._end_paragraph()
        while self.open.pop()[0] != tag:
            pass

    def handle_data(self, data: str) -> None:
        if not (self.open and self.open[-1][1]):
            self.parts.append(data)

    def _in_pre(self) -> bool:
        return any(name == "pre" for name, _ in self.open)

    def _end_paragraph(self) -> None:
        text = "".join(self.parts)
        text = text.strip("\n").rstrip() if self._in_pre() else " ".join(text.split())
        if text.strip():
            self.paragraphs.append(text)
        self.parts = []

    def finish(self) -> list[str]:
        """The paragraphs read, the last one included."""
        self._end_paragraph()
        return self.paragraphs


def split_documents(text: str) -> list[str]:
    """The text as documents of about 4500 characters, cut at blank lines.

    A paragraph above 1500 characters is cut at the end of a line or a sentence as well.
    """
    parts = re.split(r"(\n{2,})", text.strip("\n"))  # text, gap, text, gap, ..., text
    gaps = ["", *parts[1::2]]
    pieces = [piece for part, gap in zip(parts[::2], gaps, strict=True) for piece in _short_pieces(part, gap)]
    total = sum(len(piece) for piece, _ in pieces)
    count = max(1, math.ceil(total / DOCUMENT_CHARS))
    documents: list[str] = []
    written, current = 0, ""
    for piece, joint in pieces:
        current += (joint if current else "") + piece
        written += len(piece)
        if written >= total * (len(documents) + 1) / count:
            documents.append(current)
            current = ""
    return documents


def _short_pieces(paragraph: str, gap: str) -> list[tuple[str, str]]:
    """A paragraph in pieces, each with what joins it to the piece before; `gap` joins the first."""
    if len(paragraph) <= PARAGRAPH_CHARS:
        return [(paragraph, gap)]
    joint = "\n" if "\n" in paragraph else "" if HAN.search(paragraph) else " "
    parts = paragraph.split("\n") if joint == "\n" else re.split(r"(?<=[.?!]) +|(?<=[。？！])", paragraph)  # noqa: RUF001
    pieces: list[tuple[str, str]] = []
    current = ""
    for part in parts:
        if current and len(current) + len(part) > PARAGRAPH_CHARS:
            pieces.append((current, joint if pieces else gap))
            current = part
        else:
            current += (joint if current else "") + part
    return [*pieces, (current, joint if pieces else gap)]
