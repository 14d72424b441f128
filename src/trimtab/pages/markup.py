"""HTML and SVG from values. Text is made inert on its way in, so that nothing in it can become markup."""

from __future__ import annotations

from html import escape

from trimtab.render import inert

VOID = ("meta", "br")
"""Elements without an end."""


class Markup(str):
    """Text that is HTML already; whatever is not of this type is escaped when it gets into it."""

    __slots__ = ()


def escape_text(value: object) -> Markup:
    r"""A value as text of the page: markup in it is shown, control characters are spelt out.

    >>> escape_text('<b>"hi"</b>\x1b[31m')
    '&lt;b&gt;&quot;hi&quot;&lt;/b&gt;\\x1b[31m'
    """
    return value if isinstance(value, Markup) else Markup(escape(inert(str(value)), quote=True))


def join_markup(parts: object, between: str = "") -> Markup:
    """Several parts one after the other."""
    return Markup(between.join(escape_text(part) for part in parts))  # type: ignore[attr-defined]


def tag(name: str, /, *children: object, **attributes: object) -> Markup:
    """An element. `class_` is the attribute class, underscores are hyphens, None leaves an attribute out.

    >>> tag("p", "1 < 2", class_="note", data_tip='"')
    '<p class="note" data-tip="&quot;">1 &lt; 2</p>'
    """
    told = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{_attribute(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    inner = "".join(escape_text(child) for child in children if child is not None)
    if not inner and name in VOID:
        return Markup(f"<{name}{told}>")
    return Markup(f"<{name}{told}>{inner}</{name}>")


def _attribute(value: object) -> str:
    return format_coordinate(value) if isinstance(value, float) else escape(inert(str(value)), quote=True)


def format_coordinate(value: float) -> str:
    """A coordinate, short and the same on every machine.

    >>> format_coordinate(1.0), format_coordinate(2.345), format_coordinate(-0.001)
    ('1', '2.3', '0')
    """
    short = f"{value:.1f}".removesuffix(".0")
    return "0" if short == "-0" else short
