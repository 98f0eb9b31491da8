"""`Drawing`: a small SVG picture in light or dark, with the colours that all pictures of the project share."""

from __future__ import annotations

from html import escape

THEMES = {  # one palette; the accents have a contrast of at least 4.5 to their background
    "light": {
        "background": "#ffffff",
        "text": "#1f2328",
        "grey": "#59636e",
        "blue": "#0969da",
        "green": "#1a7f37",
        "yellow": "#9a6700",
        "red": "#cf222e",
    },
    "dark": {
        "background": "#0d1117",
        "text": "#e6edf3",
        "grey": "#9198a1",
        "blue": "#58a6ff",
        "green": "#3fb950",
        "yellow": "#d29922",
        "red": "#f85149",
    },
}
SANS = "-apple-system,'Segoe UI',Helvetica,Arial,sans-serif"
MONO = "ui-monospace,Menlo,Consolas,'DejaVu Sans Mono',monospace"
WIDTH = 600  # of every picture, so that texts of 15 are still read on a narrow screen


class Drawing:
    """Collects shapes. Colours are names of THEMES; sizes are in pixels at WIDTH."""

    def __init__(self, theme: str, height: int, title: str) -> None:
        self._colours = THEMES[theme]
        self._height = height
        self._title = title
        self._shapes: list[str] = []

    def text(
        self,
        x: float,
        y: float,
        text: str,
        colour: str = "text",
        size: int = 15,
        anchor: str = "start",
        *,
        bold: bool = False,
        mono: bool = False,
    ) -> None:
        """Writes a line whose baseline begins, ends ("end") or has its middle ("middle") at (x, y)."""
        weight = ' font-weight="600"' if bold else ""
        family = f' font-family="{MONO}" xml:space="preserve"' if mono else ""
        place = "" if anchor == "start" else f' text-anchor="{anchor}"'
        self._shapes.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{self._colours[colour]}"{place}{weight}{family}>'
            f"{escape(text)}</text>"
        )

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        colour: str,
        *,
        strong: bool = False,
        dashed: bool = False,
        radius: int = 5,
    ) -> None:
        """A rounded box: tinted with an outline, or filled if `strong`; with no fill if `dashed`."""
        fill = self._colours[colour]
        look = f'fill="{fill}"' if strong else f'fill="{fill}" fill-opacity="{0 if dashed else 0.13}" stroke="{fill}"'
        dash = ' stroke-dasharray="4 3"' if dashed else ""
        self._shapes.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius}" {look}{dash}/>'
        )

    def line(self, path: str, colour: str, width: float = 2, *, dashed: bool = False) -> None:
        """A line along an SVG path."""
        dash = ' stroke-dasharray="4 3"' if dashed else ""
        self._shapes.append(
            f'<path d="{path}" fill="none" stroke="{self._colours[colour]}" stroke-width="{width:g}"{dash}/>'
        )

    def key(self, y: float, *entries: tuple[str, bool | None, str]) -> None:
        """A legend in a row: (colour, strong, label) of each entry; dashed where `strong` is None."""
        x = 16.0
        for colour, strong, label in entries:
            self.box(x, y - 11, 12, 12, colour, strong=bool(strong), dashed=strong is None, radius=2)
            self.text(x + 18, y, label, "grey", 14)
            x += 18 + text_width(label, 14) + 18

    def svg(self) -> str:
        """Returns the picture as a document without references to others."""
        size = f'width="{WIDTH}" height="{self._height}" viewBox="0 0 {WIDTH} {self._height}"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" font-family="{SANS}">'
        ground = f'<rect width="{WIDTH}" height="{self._height}" fill="{self._colours["background"]}"/>'
        return "\n".join([head, f"<title>{escape(self._title)}</title>", ground, *self._shapes, "</svg>\n"])


def text_width(text: str, size: int, *, mono: bool = False) -> float:
    """Returns about how wide a text is; a little more than most fonts need."""
    return len(text) * size * (0.61 if mono else 0.54)


def fitted(text: str, width: float, size: int = 15, *, mono: bool = False) -> str:
    """Returns the text, cut with an ellipsis where it would be wider than `width`."""
    text = " ".join(text.split())
    longest = int(width / (0.93 * text_width("x", size, mono=mono)))
    return text if len(text) <= longest else text[: longest - 1].rstrip() + "…"
