"""Text as a row of tokens, some of them gone."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

from nbkit.errors import InputError


def token_html(tokens: Sequence[str], kept: Iterable[int], alt: str) -> str:
    """HTML of ``tokens`` with the positions outside ``kept`` greyed out; whitespace is kept, everything is escaped.

    >>> "&lt;b&gt;" in token_html(["a", "<b>"], kept=[0], alt="two tokens")
    True
    """
    if not isinstance(alt, str) or not alt:
        raise InputError("alt", got=alt, allowed="a sentence that says what the text shows")
    held = set(kept)
    # One span per run of equal state keeps the page small.
    runs: list[tuple[bool, list[str]]] = []
    for i, token in enumerate(tokens):
        state = i in held
        if not runs or runs[-1][0] != state:
            runs.append((state, []))
        runs[-1][1].append(token)
    gone = "opacity:.33"
    here = "background:rgba(0,158,115,.22);border-radius:3px;font-weight:600"
    spans = "".join(f'<span style="{here if state else gone}">{html.escape("".join(words))}</span>' for state, words in runs)
    style = (
        "margin:4px 0;padding:10px 12px;border:1px solid rgba(128,128,128,.35);border-radius:6px;"
        "max-height:22em;overflow:auto;white-space:pre-wrap;line-height:1.55"
    )
    return (
        f'<figure class="nbkit-tokens" role="img" aria-label="{html.escape(alt, quote=True)}" style="{style}">{spans}</figure>'
        f'<p class="nbkit-caption" style="margin:2px 0 10px;opacity:.8">{html.escape(alt)}</p>'
    )


def token_strip(tokens: Sequence[str], kept: Iterable[int], alt: str) -> None:
    """Display ``tokens`` with those outside ``kept`` greyed out, and the sentence ``alt`` below."""
    from IPython.display import publish_display_data

    publish_display_data({"text/html": token_html(tokens, kept, alt), "text/plain": alt}, metadata={"nbkit": {"alt": alt}})
