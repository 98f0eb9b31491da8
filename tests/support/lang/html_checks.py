"""A parser that checks a display: tags closed in order, no markup from texts, nothing that runs or loads."""

from __future__ import annotations

import re
from html.parser import HTMLParser

JOINED = re.compile(r"\w</(?:span|b|em|code|u)>(?:<i[^>]*></i>)*<(?:span|b|em|code|u)\b[^>]*>(?:<[^>]*>)*\w")
VOID = ("meta", "br", "rect", "line")
EVIL = "</pre></style></title><script>alert(1)</script><b title=\"x\" onload='y'>&amp;"


class Display(HTMLParser):
    """`texts`: of each element by its tag. `attributes`: as (tag, name, value)."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.html = html
        self.open: list[str] = []
        self.texts: dict[str, list[str]] = {}
        self.attributes: list[tuple[str, str, str]] = []
        self.feed(html)
        self.close()
        assert self.open == [], "an element is not closed"
        outside = re.sub(r"<pre>.*?</pre>", "", html, flags=re.DOTALL)
        assert not (found := JOINED.search(outside)), f"words are joined where no style is applied: {found}"
        assert not self.texts.keys() & {"script", "iframe", "img", "link"}
        for _, name, value in self.attributes:
            assert not name.startswith("on") and name not in ("style", "src", "href")
            assert not value.strip().lower().startswith(("http", "javascript", "data:"))

    def handle_starttag(self, tag, attrs):
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)
        self.texts.setdefault(tag, []).append("")

    def handle_startendtag(self, tag, attrs):
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open:
            self.texts[self.open[-1]][-1] += data

    def classes(self) -> list[str]:
        return [value for _, name, value in self.attributes if name == "class"]

    def body(self) -> str:
        """All texts in a row, without styles."""
        return " ".join(text for tag, texts in self.texts.items() if tag != "style" for text in texts)
