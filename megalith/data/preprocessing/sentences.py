"""Sentence splitting by rules, without a model or language data.

A sentence ends at `.`, `!`, `?` or `…` (and closing quotes or brackets after it) if white space and any character
except a lower-case letter follow, unless the full stop belongs to an abbreviation or an initial. It also ends at `。`,
`！` and `？`, and before a blank line. White space belongs to the sentence before it, so that the joined sentences give
the text. All patterns run in linear time.
"""

from __future__ import annotations

import re

_BOUNDARY = re.compile(
    r"""(?<![.!?…])(?P<stop>[.!?…]++)["'”’»)\]]*+(?=\s++(?P<next>\S))"""
    r"""|[。！？]++[”’」』）]*+"""
    r"""|(?<=\S)(?=[^\S\n]*+\n[^\S\n]*+\n)"""
)

_ABBREVIATION = re.compile(
    r"mr|mrs|ms|dr|prof|sr|jr|st|vs|etc|cf|al|inc|ltd|co|corp|nos|vol|vols|fig|figs|eq|eqs|sec|pp|eds|approx"
    r"|dept|est|gen|gov|rep|sen|col|capt|lt|sgt|rev|hon|jan|feb|mar|apr|jun|jul|aug|sep|sept|oct|nov|dec",
    re.IGNORECASE,
)
_LONGEST_WORD = 16


def split_sentences(text: str) -> list[str]:
    """Return the sentences of `text`. None of them is blank, and joining them gives `text`. A blank text has no
    sentences.
    """
    sentences: list[str] = []
    start = 0
    for boundary in _BOUNDARY.finditer(text):
        if boundary["stop"] and not _ends_sentence(text, boundary):
            continue
        sentence = text[start : boundary.end()]
        if sentence and not sentence.isspace():
            sentences.append(sentence)
            start = boundary.end()
    rest = text[start:]
    if rest.isspace() and sentences:
        sentences[-1] += rest
    elif rest and not rest.isspace():
        sentences.append(rest)
    return sentences


def _ends_sentence(text: str, boundary: re.Match[str]) -> bool:
    if boundary["next"].islower():
        return False
    if boundary["stop"] != ".":
        return True
    at = boundary.start("stop")
    words = text[max(0, at - _LONGEST_WORD) : at].split()
    word = words[-1].lstrip("(['\"“‘") if words and not text[at - 1].isspace() else ""
    initial = len(word) == 1 and word.isalpha()
    return not (initial or "." in word or _ABBREVIATION.fullmatch(word))
