"""Grammars in Lark of texts inside JSON: what is sampled parses, and its text matches."""

from __future__ import annotations

import json
from functools import cache

import pytest
from endpoint_server import chat

from headway.tokens.grammar import GrammarRefused, Grammars, json_grammar
from headway.tokens.quoted_lark import quoted_lark

PATCH = r"""start: begin hunk+ end
begin: "*** Begin Patch" LF
end: "*** End Patch" LF?
hunk: ("+" | "-") /(.*)/ LF -> line   // a line
%import common.LF
"""
SUM = 'start: term ("+" term)*\nterm: INT | "(" start ")"\n%import common.INT\n'


@cache
def grammars() -> Grammars:
    return Grammars(chat().tokenizer)


def allows(definition: str, text: str) -> bool:
    schema = {"type": "object", "properties": {"input": {"type": "string", "x-lark": definition}}}
    matcher, tokenizer = grammars().matcher(json_grammar(schema)), chat().tokenizer
    written = json.dumps({"input": text}, ensure_ascii=False)
    try:
        for token in [i for letter in written for i in tokenizer.encode(letter)]:
            matcher.advance(token)
        matcher.advance(min(grammars().stop_ids))
    except GrammarRefused:
        return False
    return True


@pytest.mark.parametrize(
    ("definition", "right", "wrong"),
    [
        (
            PATCH,
            ['*** Begin Patch\n+a "b" \\c\té\n-\n*** End Patch', "*** Begin Patch\n+\n*** End Patch\n"],
            ["x", "*** Begin Patch\n*** End Patch", "*** Begin Patch\n+a"],
        ),
        (SUM, ["1+2", "(1+(2+3))+4", "7"], ["", "1+", "(1", "1)", "a"]),
        (r'start: /[^\n"]+/', ["ab", "a\\b", "é"], ['a"', "a\nb", ""]),
        (r"start: /[\s]x\d{2}/", ["\nx12", " x34", "\tx56"], ["x12", " x1"]),
        ('start: "ab\\n"i', ["ab\n", "AB\n", "aB\n"], ["ab", "ab\\N"]),
        ('start: "a".."c" "\\""', ['a"', 'c"'], ['d"', "a"]),
        (r"start: /a.b/s | /c.d/", ["a\nb", "axb", "cxd"], ["c\nd", "ab"]),
        (
            'start: ESCAPED_STRING WS "x"\n%import common (ESCAPED_STRING, WS)\n',
            ['"a" x', '"a\\"b"\n x'],
            ['"a"x', "a x"],
        ),
        (r"start: (A | B)~2" + "\nA: /[ab]/i\nB: /\\//\n", ["a/", "AB", "//"], ["c/", "a"]),
        ("start: WORD\n%import common.WORD\n%ignore / /\n", ["ab"], ["a1"]),
    ],
)
def test_grammars_in_lark_hold_inside_json(definition: str, right: list[str], wrong: list[str]) -> None:
    assert [text for text in right if not allows(definition, text)] == []
    assert [text for text in wrong if allows(definition, text)] == []


@pytest.mark.parametrize(
    "definition",
    [
        r"start: /(?=a)b/",
        r"start: /\bb/",
        "start: %json {}",
        "%declare A\nstart: A",
        r"start: /(/",
        'start: "z".."a"',
        'start: "ab".."z"',
        "start: /a{99999999999}/",
    ],
)
def test_what_cannot_be_expressed_is_refused(definition: str) -> None:
    with pytest.raises(ValueError, match=r"can't be expressed|directives|unterminated|a range goes|repetition"):
        quoted_lark(definition)
