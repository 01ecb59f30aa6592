"""Pipeline layouts in Megatron's notation (`pipeline_model_parallel_layout`).

Et*3|(tt|)*6,t*2|L      E embedding, t a layer, L head and loss, | the end of a stage,
                        *n repeats the letter or the (group) before it, commas and spaces are ignored
"""

from __future__ import annotations

from megalith.errors import ConfigError

_LONGEST_LAYOUT = 100_000  # letters after repetition; no model has as many layers


def suggested_layout(layers: int, stages: int) -> str:
    """Return the most even layout; the first and last stage get the fewest layers."""
    each, more = divmod(layers, stages)
    start = (stages - more + 1) // 2
    sizes = [each + (start <= stage < start + more) for stage in range(stages)]
    return "E" + "|".join(f"t*{size}" if size > 1 else "t" * size for size in sizes) + "L"


def expand_layout(layout: str) -> str:
    """Return the layout with repetitions expanded: `Et*3|(tt|)*2L` -> `Ettt|tt|tt|L`.

    Raises:
        ConfigError: the layout has a syntax error.
    """
    text = layout.replace(",", "").replace(" ", "")
    expanded, rest = _expand(layout, text)
    if rest:
        raise ConfigError(
            f"pipeline_model_parallel_layout {layout!r} has ')' without '(' before {rest!r}; remove the ')'"
        )
    return expanded


def _expand(layout: str, text: str) -> tuple[str, str]:
    """Expand up to the end or an unmatched ")". Return the expansion and the unread rest."""
    done = ""
    while text and text[0] != ")":
        letter, text = text[0], text[1:]
        if letter == "(":
            unit, text = _expand(layout, text)
            if not text:
                raise ConfigError(
                    f"pipeline_model_parallel_layout {layout!r} has a '(' that is not closed; add a ')'"
                )
            text = text[1:]
        elif letter in "EtL|":
            unit = letter
        else:
            raise ConfigError(
                f"pipeline_model_parallel_layout {layout!r} has a {letter!r}; it takes E (embedding), t (layer), "
                "L (head and loss), | (end of a stage), *n and ( )"
            )
        times = 1
        if text.startswith("*"):
            digits = text[1 : len(text) - len(text[1:].lstrip("0123456789"))]
            if not digits:
                raise ConfigError(
                    f"pipeline_model_parallel_layout {layout!r} has a '*' without a number; write a number, as in 't*3'"
                )
            times, text = int(digits[:6]), text[1 + len(digits) :]
        if len(done) + len(unit) * times > _LONGEST_LAYOUT:
            raise ConfigError(
                f"pipeline_model_parallel_layout {layout!r} has more than {_LONGEST_LAYOUT:,} letters when written "
                "out; repeat less"
            )
        done += unit * times
    return done, text
