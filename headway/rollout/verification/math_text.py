"""Normalization of mathematical texts to one spelling of LaTeX, from any typography."""

from __future__ import annotations

import re
import unicodedata

from headway.rollout.verification.extraction import MINUS

_NAMED = {
    **dict.fromkeys(MINUS, "-"),
    **{"×": r"\times ", "·": r"\cdot ", "÷": r"\div ", "π": r"\pi ", "∞": r"\infty ", "≤": r"\leq ", "≥": r"\geq "},
    **{"≠": r"\neq ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "°": r"^\circ ", "…": r"\ldots ", "±": r"\pm "},
    **{"∅": r"\emptyset ", "⟨": r"\langle ", "⟩": r"\rangle ", "ℝ": r"\mathbb{R}", "√": r"\sqrt ", "’": "'", "′": "'"},
}
_REWRITTEN = [
    (re.compile(pattern), text)
    for pattern, text in (
        (r"\$|(?<!\\)\\[()\[\]]", ""),
        (r"\\(?:left|right|displaystyle|limits|[bB]igg?[lr]?)(?![A-Za-z])", ""),
        (r"\{,\}|(?<=\d)\\!,\\!(?=\d{3})", ","),
        (r"(?<!\\)\\(?:q?quad(?![A-Za-z])|[ ,;:!>])|~|\s", " "),
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        (r"\\frac *(\d) *(\d)", r"\\frac{\1}{\2}"),
        (r"\\frac *(\d) *\{", r"\\frac{\1}{"),
        (r"\\frac *(\{[^{}]*\}) *(\d)", r"\\frac\1{\2}"),
        (r"\\le(?![A-Za-z])|<=|\\leqslant(?![A-Za-z])", r"\\leq "),
        (r"\\ge(?![A-Za-z])|>=|\\geqslant(?![A-Za-z])", r"\\geq "),
        (r"\\lt(?![A-Za-z])", "<"),
        (r"\\gt(?![A-Za-z])", ">"),
        (r"\\ne(?![A-Za-z])|!=", r"\\neq "),
        (r"\\(?:c|l)?dots(?:[cb])?(?![A-Za-z])|\.\.\.+", r"\\ldots "),
        (r"\\lbrace(?![A-Za-z])", r"\\{"),
        (r"\\rbrace(?![A-Za-z])", r"\\}"),
        (r"\\varnothing(?![A-Za-z])|\\\{ *\\\}", r"\\emptyset "),
        (r"\\mathbb +([A-Z])(?![A-Za-z])", r"\\mathbb{\1}"),
        (r"(?<![A-Za-z\\])pi(?![A-Za-z])", r"\\pi "),
        (r"(?<![A-Za-z\\])sqrt\(([^()]*)\)", r"\\sqrt{\1}"),
        (r"(?<![A-Za-z\\])(exp|ln|log|sin|cos|tan|arcsin|arccos|arctan)(?=\()", r"\\\1"),
        (r"\\%", "%"),
        (r"\\(?:mathbf|mathit|textbf|textit|boldsymbol|emph|mathsf)\{([^{}]*)\}", r"\1"),
        (r"\\(?:mathrm|mbox|hbox|textrm|textsf|operatorname|rm) *\{", r"\\text{"),
        (r"\\sqrt +(\d+|[A-Za-z])", r"\\sqrt{\1}"),
        (r"\^\{\\circ\}|\\degree(?![A-Za-z])", r"^\\circ "),
        (r"\\lbrack(?![A-Za-z])", "["),
        (r"\\rbrack(?![A-Za-z])", "]"),
        (r"^\s*(?:=|\#+(?= )|\*\*(?=.*\*\*\s*$))|(?<=.)\*\*\s*$", ""),  # marks before an answer, and bold type
        (r"^\s*\\text\{ *(\(?[A-Za-z]\)?) *\}\s*$", r"\1"),  # a choice
    )
]
_BLANK = re.compile(r"(?<![A-Za-z0-9.]) | (?![A-Za-z0-9.])")  # except between two words or numbers
_COMMAND_BLANK = re.compile(r"(\\[A-Za-z]+) (?![A-Za-z])")
_NAMED_TABLE = str.maketrans({mark: "-" for mark in MINUS})


def plain_text(text: str) -> str:
    """Normalize ``text`` to one spelling of LaTeX, with only its significant blanks."""
    text = unicodedata.normalize("NFC", text)
    pieces: list[str] = []
    for character in text:
        decomposition_tag, spelling = unicodedata.decomposition(character).partition(" ")[0], ""
        if decomposition_tag == "<fraction>":
            numerator, _, denominator = unicodedata.normalize("NFKC", character).partition("\u2044")
            spelling = f"\\frac{{{numerator}}}{{{denominator}}}" if denominator else character
        elif decomposition_tag in ("<super>", "<sub>"):
            mark = "^" if decomposition_tag == "<super>" else "_"
            script_text = unicodedata.normalize("NFKC", character).translate(_NAMED_TABLE)
            continues_script = bool(pieces) and pieces[-1].startswith(mark + "{") and pieces[-1].endswith("}")
            spelling = f"{pieces.pop()[:-1]}{script_text}}}" if continues_script else f"{mark}{{{script_text}}}"
        elif decomposition_tag == "<wide>":
            spelling = unicodedata.normalize("NFKC", character)
        pieces.append(spelling or _NAMED.get(character, character))
    text = "".join(pieces)
    for pattern, replacement in _REWRITTEN:
        text = pattern.sub(replacement, text)
    text = _BLANK.sub("", re.sub(" +", " ", text))
    return _COMMAND_BLANK.sub(r"\1", text).strip().rstrip(".").strip()
