"""Pictures as SVG: shapes and text, in pixels."""

import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable

INK, FAINT = "#222222", "#d0d0d0"


def empty_picture(width: float, height: float) -> ElementTree.Element:
    """An empty white picture."""
    picture = ElementTree.Element(
        "svg",
        {
            "xmlns": "http://www.w3.org/2000/svg",
            "viewBox": f"0 0 {pixels(width)} {pixels(height)}",
            "width": pixels(width),
            "height": pixels(height),
            "font-family": "system-ui, Helvetica, Arial, sans-serif",
            "font-size": "12",
            "fill": INK,
        },
    )
    rectangle(picture, 0, 0, width, height, fill="white")
    return picture


def written(picture: ElementTree.Element) -> str:
    """The text of the SVG file."""
    ElementTree.indent(picture)
    return ElementTree.tostring(picture, encoding="unicode") + "\n"


def hexadecimal(color: tuple[int, ...]) -> str:
    return "#" + "".join(f"{part:02x}" for part in color)


def rectangle(
    picture: ElementTree.Element, x: float, y: float, width: float, height: float, **attributes: str
) -> ElementTree.Element:
    sizes = {"x": x, "y": y, "width": width, "height": height}
    named = {name: pixels(size) for name, size in sizes.items()} | _attributes(attributes)
    return ElementTree.SubElement(picture, "rect", named)


def text(picture: ElementTree.Element, x: float, y: float, text: str, **attributes: str) -> float:
    """Writes `text`; returns its approximate width at font size 12."""
    named = {"x": pixels(x), "y": pixels(y)} | _attributes(attributes)
    ElementTree.SubElement(picture, "text", named).text = text
    return text_width(text)


def legend(picture: ElementTree.Element, x: float, y: float, colors: Iterable[str], meaning: str) -> float:
    """Draws a square of each colour and their meaning beside them; returns the left end of the next entry."""
    for color in colors:
        rectangle(picture, x, y, 14, 14, fill=color)
        x += 15
    return x + 5 + text(picture, x + 5, y + 11, meaning) + 18


def _attributes(named: dict[str, str]) -> dict[str, str]:
    """Python names → SVG names: `stroke_width` is stroke-width, `class_` is class."""
    return {name.rstrip("_").replace("_", "-"): value for name, value in named.items()}


def text_width(text: str) -> float:
    """The approximate width of a text at font size 12."""
    return 6.7 * len(text)


def pixels(size: float) -> str:
    return f"{round(size, 2):.10g}"
