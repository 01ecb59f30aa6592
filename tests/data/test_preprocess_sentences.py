"""The sentence splitter: its rules, that nothing is lost, and that no text makes it slow."""

import sysconfig
import time
from pathlib import Path

import pytest

from megalith.data.preprocessing.sentences import split_sentences


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("One. Two! Three? Four", ["One.", " Two!", " Three?", " Four"]),
        ("He said “No.” She left.", ["He said “No.”", " She left."]),
        ("Wait… What? (Really!) Yes.", ["Wait…", " What?", " (Really!)", " Yes."]),
        ("Version 3.11 is out. It costs 4.50 today.", ["Version 3.11 is out.", " It costs 4.50 today."]),
        (
            "Mr. Smith met Dr. Who, e.g. Tuesday. J. R. Tolkien.",
            ["Mr. Smith met Dr. Who, e.g. Tuesday.", " J. R. Tolkien."],
        ),
        ("it ended. and went on", ["it ended. and went on"]),
        ("私は走った。彼は笑った！そして", ["私は走った。", "彼は笑った！", "そして"]),
        (
            "A heading\n\nA paragraph\nof two lines\n \n\nEnd",
            ["A heading", "\n\nA paragraph\nof two lines", "\n \n\nEnd"],
        ),
        ("  lead. Trail  \n", ["  lead.", " Trail  \n"]),
        ("End.\n\n", ["End.\n\n"]),
        ("...", ["..."]),
        (" \n\n ", []),
        ("", []),
    ],
)
def test_rules(text, sentences):
    assert split_sentences(text) == sentences


@pytest.mark.parametrize("module", ["argparse.py", "difflib.py", "_pydecimal.py", "textwrap.py"])
def test_sentences_joined_are_the_text(module):
    text = (Path(sysconfig.get_path("stdlib")) / module).read_text(encoding="utf-8")
    sentences = split_sentences(text)
    assert "".join(sentences) == text
    assert len(sentences) > 20
    assert not any(sentence.isspace() for sentence in sentences)


@pytest.mark.parametrize("unit", [".", '!"', "\n", ". ", "a. ", " ", "。", "\n \n", "A. B) "])
def test_time_is_linear_in_the_text(unit):
    start = time.process_time()
    split_sentences(unit * 200_000)
    assert time.process_time() - start < 5  # a quadratic pattern takes minutes
