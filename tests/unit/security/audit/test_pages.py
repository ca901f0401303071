"""Templates and charts escape everything, and bring all that they need."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from jinja2 import UndefinedError

import security.audit
from security.audit.pages import Dot, Drawing, Label, environment
from security.audit.text import Span, digest


def shown(template: str, **facts: object) -> str:
    """A template of our own with the report's parts and rules."""
    parts = '{% from "parts.html" import chart, show, table, terms %}'
    return environment().from_string(parts + template).render(facts)


def test_templates_escape_everything_but_markup() -> None:
    assert shown('<p class="{{ x }}">{{ y }}</p>', x='"x"', y="<b>") == '<p class="&#34;x&#34;">&lt;b&gt;</p>'
    assert shown("<p>{{ show(x) }}</p>", x=(Span("x"), "a", 1000)) == "<p><strong>x</strong>a1,000</p>"
    assert shown("{{ show(x) }}", x=Span(Span("<b>", "alarm"), '"x"')) == (
        '<span class="&#34;x&#34;"><strong class="alarm">&lt;b&gt;</strong></span>'
    )
    assert "\x1b" not in shown("<p>{{ x }}</p>", x="\x1b[31m")
    assert "\u202e" not in shown("{{ show(x) }}", x=Span("\u202e", "code"))
    assert f'title="{"a" * 64}"' in shown("{{ show(x) }}", x=digest("a" * 64, 8))
    assert "<script" not in shown("{{ table(x, y) }}", x=("<script>",), y=[("<script>",)])
    assert "<script" not in shown("{{ terms(x) }}", x=[("<script>", "<script>")])


def test_charts_escape_too() -> None:
    drawing = Drawing(title="<b>", height=10, labels=[Label(0, 0, "<b>")], dots=[Dot(0, 0, "<b>")])
    page = shown("{{ chart(x, y) }}", x=drawing, y="<b>")
    assert page.count("&lt;b&gt;") == 4
    assert "<b>" not in page


TEMPLATES = sorted((Path(security.audit.__file__).parent / "templates").iterdir())


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.name)
def test_templates_are_self_contained_and_switch_no_escaping_off(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    assert not re.search(r"\|\s*safe\b|autoescape|\bsrc=|\bhref=|<script|<link|@import|url\(|\bon[a-z]+=", source)
    assert set(re.findall(r"https?://[^\s\"')]+", source)) <= {"http://www.w3.org/2000/svg"}


def test_a_name_that_a_template_does_not_get_is_an_error() -> None:
    with pytest.raises(UndefinedError):
        shown("{{ x.nothing }}", x={})
