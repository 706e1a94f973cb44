"""The fifteen papers: what each notebook asks, a picture for it, and which notebooks are here already.

`show` makes the table of contents of ``notebooks/index.ipynb``. Whether a notebook exists is read from the folder, never written down.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from nbkit.errors import InputError
from nbkit.widgets.theme import BLUE, GREEN, ORANGE

__all__ = ["GROUPS", "PAPERS", "Gallery", "Paper", "paper", "show"]

# Name of a group -> what its papers have in common.
GROUPS = {
    "Inference": "Doing less work, or holding less in memory, while a language model reads and writes.",
    "Compression": "Making the weights themselves smaller after training.",
    "In-context learning": "What a frozen model can work out from the examples in front of it.",
    "Agents": "What an agent should ask, say and remember while it works.",
    "Post-training": "Teaching a student model from its own attempts.",
}

# The text colour of the page, so that a picture reads on a light and on a dark one.
INK = "currentColor"
WIDTH, HEIGHT = 120, 72


# Pictures. Three colours of the palette have enough contrast on both kinds of page; what is left out or dropped is faint ink.


def _box(x: float, y: float, w: float, h: float, color: str = INK, *, line: float = 0, faint: bool = False, dash: str = "") -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="1.5" {_paint(color, line, faint, dash)}/>'


def _dot(x: float, y: float, r: float = 3, color: str = INK, *, line: float = 0, faint: bool = False, dash: str = "") -> str:
    return f'<circle cx="{x:g}" cy="{y:g}" r="{r:g}" {_paint(color, line, faint, dash)}/>'


def _line(d: str, color: str = INK, *, line: float = 2.5, faint: bool = False, dash: str = "") -> str:
    return f'<path d="{d}" stroke-linecap="round" stroke-linejoin="round" {_paint(color, line, faint, dash)}/>'


def _head(x: float, y: float, color: str = INK) -> str:
    """The head of an arrow that arrives at (x, y) from the left."""
    return _line(f"M{x - 5:g} {y - 4:g} L{x:g} {y:g} L{x - 5:g} {y + 4:g}", color, line=2)


def _arrow(x: float, y: float, to: float, color: str = INK) -> str:
    return _line(f"M{x:g} {y:g} H{to:g}", color, line=2) + _head(to, y, color)


def _sign(x: float, y: float, text: str, color: str = INK, size: int = 14) -> str:
    return (f'<text x="{x:g}" y="{y:g}" font-size="{size}" font-weight="700" font-family="sans-serif" text-anchor="middle" fill="{color}">'
            f"{html.escape(text)}</text>")


def _paint(color: str, line: float, faint: bool, dash: str) -> str:
    look = f'fill="none" stroke="{color}" stroke-width="{line:g}"' if line else f'fill="{color}"'
    return look + (' opacity="0.3"' if faint else "") + (f' stroke-dasharray="{dash}"' if dash else "")


def _ams() -> str:
    """Three segments of equal mass; each keeps its best tokens."""
    heights = (34, 22, 12, 9, 15, 10, 7, 13, 8, 11, 20, 30)
    kept = {0, 1, 4, 7, 10, 11}
    bars = [_box(7 + 9 * i, 50 - h, 6, h, BLUE if i in kept else INK, faint=i not in kept) for i, h in enumerate(heights)]
    brackets = [_line(f"M{a} 56 V61 H{b} V56", ORANGE) for a, b in ((7, 21), (26, 84), (89, 112))]
    return "".join(bars + brackets)


def _fastprefill() -> str:
    """Layer by layer, from the bottom up, fewer tokens stay."""
    rows = ((60, 12), (48, 12), (36, 8), (24, 5), (12, 2))
    kept = [_box(7 + 9 * i, y - 3.5, 6, 7, BLUE) for y, keep in rows for i in range(keep)]
    dropped = [_box(7.6 + 9 * i, y - 2.9, 4.8, 5.8, ORANGE, line=1.2, faint=True) for y, keep in rows for i in range(keep, 12)]
    return "".join(kept + dropped)


def _adacal() -> str:
    """A causal attention map: first column and diagonal are always read, patches in the middle are added for a head that needs them."""
    return "".join((
        _line("M28 6 V66 H96 Z", faint=True, line=2),
        _line("M31 13 V63", BLUE, line=6), _line("M40 20 L88 63", BLUE, line=6),
        _box(42, 40, 9, 9, ORANGE), _box(56, 53, 9, 9, ORANGE), _box(39, 54, 9, 9, ORANGE, line=1.8, dash="3 2"),
    ))


def _attention_drift() -> str:
    """Each drafted token looks less at the prompt and more at its own neighbours."""
    prompt = [_box(5 + 12 * i, 46, 9, 14) for i in range(3)]
    drafts = [_dot(54 + 18 * i, 53, 5.5, ORANGE if i > 1 else BLUE) for i in range(4)]
    looks = [_line("M54 44 Q34 18 11 42", BLUE, line=3.5), _line("M72 44 Q44 2 11 38", BLUE, line=1.6, dash="4 3"),
             _line("M90 44 Q81 28 73 43", ORANGE, line=3), _line("M108 44 Q99 20 91 43", ORANGE, line=4.5)]
    return "".join(prompt + drafts + looks)


def _compot() -> str:
    """A matrix equals an orthogonal set of directions times a table with a few entries a column."""
    cells = [(i, j) for i in range(4) for j in range(4)]
    filled = {(0, 1), (1, 3), (2, 0), (3, 2), (0, 3), (2, 2), (1, 0), (3, 1)}
    dense = [_box(3 + 8 * i, 20 + 8 * j, 7, 7) for i, j in cells]
    axes = [_line("M53 51 V20", BLUE, line=3), _line("M53 51 H78", BLUE, line=3), _line("M53 43 H61 V51", BLUE, line=1.5)]
    sparse = [_box(88 + 8 * i, 20 + 8 * j, 7, 7, ORANGE if (i, j) in filled else INK, faint=(i, j) not in filled) for i, j in cells]
    return "".join([*dense, _sign(43, 41, "="), *axes, _sign(82.5, 41, "·", size=20), *sparse])


def _local_reconstruction() -> str:
    """A dense network above, its pruned copy below; one window at a time is made to match."""
    parts = []
    for block in range(5):
        x = 6 + 23 * block
        for i in range(2):
            for j in range(3):
                across, down = x + 5 + 8 * i, 8 + 7 * j
                pruned = (2 * i + j + block) % 3 == 0
                parts.append(_dot(across, down, 2.6))
                parts.append(_dot(across, down + 42, 2.2, line=1, faint=True) if pruned else _dot(across, down + 42, 2.6, BLUE))
    parts += [_box(49.5, 2.5, 23, 67, ORANGE, line=2, dash="5 3"), _sign(61, 41.5, "=", ORANGE, 18)]
    return "".join(parts)


def _crumb() -> str:
    """Two clusters of questions (triangles), each with one shared circle of examples (dots)."""
    parts = [_dot(x, y, 2.2, faint=True) for x, y in ((6, 10), (60, 7), (62, 36), (58, 64), (113, 8), (5, 64), (114, 66), (64, 21))]
    for x, y in ((30, 36), (91, 36)):
        parts.append(_dot(x, y, 26, BLUE, line=2, dash="5 3"))
        parts += [_dot(x + a, y + b, 3, BLUE) for a, b in ((-16, -4), (-7, -17), (9, -15), (17, 1), (11, 14), (-9, 15))]
        parts += [_line(f"M{x + a} {y + b - 4} l4 7 h-8 Z", ORANGE, line=2) for a, b in ((-5, -2), (5, -3), (0, 7))]
    return "".join(parts)


def _align_rag() -> str:
    """A found series, too small and too early, is shifted and stretched onto the query and continues it."""
    return "".join((
        _line("M4 60 q6 -9 12 0 t12 0 t12 0", ORANGE, line=2, dash="4 3"), _arrow(48, 60, 66, ORANGE),
        _line("M8 30 q11 -34 22 0 t22 0 t22 0", line=2.5), _line("M74 30 q11 -34 22 0 t20 3", BLUE, line=3, dash="1 5"),
        _line("M74 8 V66", faint=True, line=1.5), _line("M78 60 q7.5 -20 15 0 t15 0", ORANGE, line=2),
    ))


def _icl_curiosity() -> str:
    """The agent turns from a screen full of noise to an experiment that narrows its uncertainty."""
    specks = ((12, 22), (18, 34), (23, 19), (27, 41), (33, 28), (37, 37), (39, 20), (14, 44), (30, 35), (21, 27))
    screen = [_box(6, 13, 38, 38, ORANGE, line=2.5), *[_box(x, y, 3, 3, ORANGE) for x, y in specks], _line("M25 51 V59 M17 59 H33", ORANGE)]
    band = [_line("M82 10 Q98 31 115 34 M82 62 Q98 41 115 38", BLUE), _line("M82 36 H115", BLUE, line=1.5, dash="3 3"), _dot(92, 36, 3.2, GREEN)]
    return "".join([*screen, _dot(58, 36, 5), _arrow(66, 36, 77), *band])


def _bayes_attention() -> str:
    """Noisy points draw together in steps; the original noisy point takes a detour around them."""
    noisy = ((10, 26), (22, 20), (31, 33), (13, 43), (25, 49), (34, 57), (8, 58), (20, 34))
    clean = ((92, 34), (96, 36), (93, 39), (107, 51), (111, 53), (106, 55), (97, 62), (94, 58))
    return "".join([
        *[_dot(x, y, 2.8) for x, y in noisy[1:]], _dot(*noisy[0], 3.5, ORANGE), _arrow(44, 44, 80),
        *[_dot(x, y, 2.8, BLUE) for x, y in clean], _line("M11 19 C30 -2 92 -2 99 24", ORANGE, line=2, dash="5 3"),
        _line("M94 20 L99 25 L102 18", ORANGE, line=2),
    ])


def _cot_depth() -> str:
    """Error falls with the first thoughts, reaches a minimum and rises again."""
    points = ((26, 16), (40, 34), (54, 46), (68, 50), (82, 44), (96, 32), (110, 14))
    curve = "M" + " L".join(f"{x} {y}" for x, y in points)
    return "".join([_line("M14 8 V62 H114", line=2), _line(curve, BLUE), *[_dot(x, y, 3, BLUE) for x, y in points if x != 68],
                    _line("M68 50 V62", ORANGE, line=1.8, dash="3 3"), _dot(68, 50, 5, ORANGE)])


def _clarification_timing() -> str:
    """A question asked early is worth much, the same question asked late is worth little."""
    def bubble(x: float, y: float, color: str, dash: str = "") -> str:
        return _line(f"M{x} {y} h18 v15 h-8 l-5 6 v-6 h-5 Z", color, line=2, dash=dash) + _sign(x + 9, y + 12, "?", color, 13)

    ticks = " ".join(f"M{x} 59 V65" for x in (12, 36, 60, 84))
    return "".join((_line("M6 62 H110", line=2), _head(114, 62), _line(ticks, line=1.5), _line("M12 12 C28 14 34 50 108 54", BLUE, line=3),
                    bubble(30, 6, GREEN), bubble(88, 26, ORANGE, "3 2")))


def _bounded_communication() -> str:
    """The sender sees everything, the receiver little; a short message must fit through."""
    sees = [_box(7 + 8 * i, 13 + 8 * j, 6.5, 6.5, BLUE if (i, j) in {(1, 2), (3, 4)} else INK, faint=(i, j) not in {(1, 2), (3, 4)})
            for i in range(4) for j in range(6)]
    letter = [_box(50, 28, 20, 15, BLUE, line=2.2), _line("M50 29 L60 37 L70 29", BLUE, line=2)]
    return "".join([*sees, *letter, _line("M41 36 H46", line=2), _arrow(74, 36, 86),
                    _line("M91 10 V29 M91 43 V62", ORANGE, line=3.5), _dot(105, 36, 9, line=2.5), _dot(105, 36, 3)])


def _taco() -> str:
    """A long terminal output becomes a short one that still holds the line that matters."""
    lines = [_line(f"M11 {y} h{w}", faint=True, line=3) for y, w in ((22, 36), (29, 30), (43, 34), (50, 26), (57, 36))]
    return "".join([
        _box(4, 5, 52, 62, line=2), _line("M4 14 H56", line=1.5), _dot(9, 9.7, 1.5), _dot(14, 9.7, 1.5), *lines, _line("M11 36 h32", ORANGE, line=4),
        _arrow(62, 36, 74), _box(80, 19, 36, 34, line=2), _line("M80 28 H116", line=1.5), _dot(85, 23.7, 1.5), _line("M87 36 h22", ORANGE, line=4),
        _line("M87 45 h13", GREEN, line=3),
    ])


def _f_opd() -> str:
    """A queue of samples between student and teacher; the older a sample, the smaller its weight."""
    weights = (24, 17, 10, 5)
    bars = [_box(36 + 12 * i, 44 - h, 8, h, BLUE) for i, h in enumerate(weights)]
    return "".join([
        _dot(16, 34, 11, GREEN, line=2.5), _sign(16, 39, "S", GREEN), _dot(104, 34, 11, ORANGE, line=2.5), _sign(104, 39, "T", ORANGE),
        *bars, _line("M32 47 H84", line=2), _line("M104 50 C100 68 22 68 17 51", line=2, dash="5 3"), _line("M13 56 L17 50 L22 55", line=2),
        _line("M16 18 C22 2 96 0 104 17", line=2), _line("M98 14 L104 18 L107 11", line=2),
    ])


# Papers.


@dataclass(frozen=True)
class Paper:
    """One paper of the collection: `shapes` is the inside of its picture, `alt` says in words what the picture shows.

    arxiv: the id, or None where neither id nor full title could be found.

    Raises: InputError for a group that does not exist.
    """

    slug: str
    group: str
    title: str
    arxiv: str | None
    question: str
    alt: str
    shapes: str = field(repr=False)

    def __post_init__(self) -> None:
        if self.group not in GROUPS:
            raise InputError(f"group of {self.slug}", got=self.group, allowed=", ".join(GROUPS))

    def picture(self) -> str:
        """The picture as an SVG element; its text alternative is both its label and its tooltip."""
        alt = html.escape(self.alt)
        return (f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" role="img" aria-label="{alt}">'
                f"<title>{alt}</title>{self.shapes}</svg>")


PAPERS = (
    Paper("ams", "Inference", "Adaptive Mass-Segmented KV Compression for Long-Context Reasoning", "2605.23200",
          "When a model's memory of its own reasoning must shrink, does a share for every stretch of text stop whole stretches from vanishing?",
          "Bars of attention in three bracketed segments; in each segment the highest are kept.", _ams()),
    Paper("fastprefill", "Inference", "FastPrefill", None,
          "How many tokens can each layer drop for good while it reads a long prompt, and does a searched schedule beat a hand-made one?",
          "Five rows of tokens, one per layer; from the bottom up fewer and fewer remain.", _fastprefill()),
    Paper("adacal", "Inference", "AdaCal", None,
          "Can a cheap probe tell which attention heads may skip most of a long prompt and which must look further?",
          "A triangular attention map: first column and diagonal are read, a few patches between are added.", _adacal()),
    Paper("attention_drift", "Inference", "Attention Drift: What Autoregressive Speculative Decoding Models Learn", "2605.09992",
          "Why do the later guesses of a draft model get worse, and does normalising its state keep its attention on the prompt?",
          "Four drafted tokens: the first look back at the prompt, the last only at their neighbours.", _attention_drift()),
    Paper("compot", "Compression", "COMPOT: Calibration-Optimized Matrix Procrustes Orthogonalization for Transformers Compression", "2602.15200",
          "At equal storage, is a matrix better kept as a few picks per column from one orthogonal set than as a low-rank product?",
          "A full grid equals two perpendicular arrows times a grid with few filled cells.", _compot()),
    Paper("local_reconstruction", "Compression", "A Free Lunch in LLM Compression: Revisiting Retraining after Pruning", "2510.14444",
          "After pruning, is repairing the network window by window on little data as good as retraining all of it?",
          "Five dense blocks above five blocks with holes; a dashed frame makes one pair match.", _local_reconstruction()),
    Paper("crumb", "In-context learning", "CRUMB: Efficient Prior Fitted Network Inference via Distributionally Matched Context Batching",
          "2606.11473",
          "Can a whole cluster of test rows share one well-chosen set of examples without losing accuracy?",
          "Two dashed circles of example dots, each around its own group of question triangles.", _crumb()),
    Paper("align_rag", "In-context learning", "Align-RAG: Alignment Is All You Need for TSFM In-Context Learning", "2608.05571",
          "Can a frozen forecaster use similar stretches of the past once they are shifted and scaled to fit the present?",
          "A small dashed wave is enlarged and moved under the end of a larger wave, whose dotted continuation it predicts.", _align_rag()),
    Paper("icl_curiosity", "In-context learning", "Can In-Context Learning Support Intrinsic Curiosity?", "2606.19476",
          "Can a model that learns from its context tell an agent which experiment teaches most, without being fooled by noise?",
          "A dot turns away from a screen of noise towards a band that narrows.", _icl_curiosity()),
    Paper("bayes_attention", "In-context learning", "Attention as In-Context Empirical Bayes: A Two-Stage View via Particle Dynamics", "2605.29351",
          "Can layers of attention clean a set of noisy points although they never see a clean one?",
          "Scattered points become three tight groups; one original point takes a dashed path around to them.", _bayes_attention()),
    Paper("cot_depth", "In-context learning", "An Asymptotic Theory of Chain-of-Thought in In-Context Learning", "2606.03217",
          "How often should a model feed its answer back to itself, and when does one more thought make it worse?",
          "A curve of error against depth that falls to a marked minimum and rises again.", _cot_depth()),
    Paper("clarification_timing", "Agents", "Ask Early, Ask Late, Ask Right: When Does Clarification Timing Matter for Long-Horizon Agents?",
          "2605.07937",
          "When an instruction leaves something out, how fast does an answer lose its worth while the work goes on?",
          "A falling curve over a time line, with one question mark early and one late.", _clarification_timing()),
    Paper("bounded_communication", "Agents", "Bayes-Sufficient Compression Is Not Enough: How Does Communication Help Multi-Agent Systems?",
          "2610.03769",
          "When does a message help a reader of limited ability, and when is silence or the raw material better?",
          "A large grid with two marked cells, an envelope, and a narrow gap in front of the reader.", _bounded_communication()),
    Paper("taco", "Agents", "A Self-Evolving Framework for Efficient Terminal Agents via Observational Context Compression", "2604.19572",
          "Can rules that grow with use shorten what a terminal prints and never lose the one line that matters later?",
          "A terminal full of lines and a smaller one that still holds the marked line.", _taco()),
    Paper("f_opd", "Post-training", "f-OPD: Stabilizing Long-Horizon On-Policy Distillation with Freshness-Aware Control", "2605.17862",
          "When student and teacher stop waiting for each other, does weighting samples by freshness keep training stable?",
          "A student and a teacher with a queue of samples between them; older samples have shorter bars.", _f_opd()),
)


def paper(slug: str) -> Paper:
    """The paper of that slug.

    Raises: InputError for an unknown slug.

    >>> paper("ams").arxiv
    '2605.23200'
    """
    for entry in PAPERS:
        if entry.slug == slug:
            return entry
    raise InputError("paper", got=slug, allowed=", ".join(entry.slug for entry in PAPERS))


# The table of contents.

# Colours come from the page. Two classes outweigh JupyterLab's own rules for lists and headings.
_STYLE = """
.nbkit-gallery { max-width: 980px; font-size: 15px; line-height: 1.45; }
.nbkit-gallery h3.nbkit-group { margin: 1.3em 0 .1em; font-size: 1.25em; }
.nbkit-gallery p.nbkit-about { margin: 0 0 .6em; opacity: .8; }
.nbkit-gallery ul.nbkit-papers { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 400px), 1fr)); gap: 12px;
  margin: 0; padding: 0; list-style: none; }
.nbkit-gallery li.nbkit-paper { display: flex; gap: 14px; align-items: flex-start; margin: 0; padding: 12px;
  border: 1px solid rgba(127, 127, 127, .5); border-radius: 8px; list-style: none; }
.nbkit-gallery li.nbkit-paper svg { flex: none; max-width: 34%; height: auto; }
.nbkit-gallery .nbkit-title { display: block; font-weight: 650; line-height: 1.3; }
.nbkit-gallery .nbkit-question { display: block; margin: 4px 0; }
.nbkit-gallery .nbkit-facts { display: block; font-size: 13px; }
.nbkit-gallery li.nbkit-absent { border-style: dashed; }
.nbkit-gallery li.nbkit-absent > div { opacity: .72; }
.nbkit-gallery li.nbkit-absent svg { opacity: .6; }
"""


@dataclass(frozen=True)
class Gallery:
    """Papers by group, those with a notebook as links; prints as text and shows as cards in Jupyter. present: slugs whose notebook exists."""

    papers: tuple[Paper, ...]
    present: frozenset[str]

    def __str__(self) -> str:
        width = max(len(entry.slug) for entry in self.papers)
        lines = []
        for group, members in self._groups():
            lines.append(group)
            lines += [f"  {'✓' if entry.slug in self.present else '·'} {entry.slug:<{width}}  {entry.question}" for entry in members]
        return "\n".join([*lines, self._count()])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        parts = [f"<style>{_STYLE}</style>", '<div class="nbkit-gallery">']
        for group, members in self._groups():
            parts.append(f'<h3 class="nbkit-group">{html.escape(group)}</h3><p class="nbkit-about">{html.escape(GROUPS[group])}</p>')
            parts += ['<ul class="nbkit-papers">', *[self._card(entry) for entry in members], "</ul>"]
        return "".join([*parts, f'<p class="nbkit-about">{self._count()}</p></div>'])

    def _groups(self) -> list[tuple[str, list[Paper]]]:
        found = [(group, [entry for entry in self.papers if entry.group == group]) for group in GROUPS]
        return [(group, members) for group, members in found if members]

    def _count(self) -> str:
        return f"Notebooks here: {sum(entry.slug in self.present for entry in self.papers)} of {len(self.papers)}."

    def _card(self, entry: Paper) -> str:
        here = entry.slug in self.present
        slug, title, question = (html.escape(text) for text in (entry.slug, entry.title, entry.question))
        name = f'<a class="nbkit-title" href="{slug}.ipynb">{title}</a>' if here else f'<span class="nbkit-title">{title}</span>'
        facts = [f"<code>{slug}</code>", f"arXiv {html.escape(entry.arxiv)}" if entry.arxiv else "full title and arXiv id not found"]
        if not here:
            facts.append("<strong>notebook not there yet</strong>")
        return (f'<li class="nbkit-paper{"" if here else " nbkit-absent"}">{entry.picture()}<div>{name}'
                f'<span class="nbkit-question">{question}</span><span class="nbkit-facts">{" · ".join(facts)}</span></div></li>')


def show(folder: str | Path | None = None, *, papers: Sequence[Paper] = PAPERS) -> Gallery:
    """The table of contents of the notebooks in `folder` (default: ``notebooks/`` of the checkout, else the current folder).

    >>> show("no-such-folder").present
    frozenset()
    """
    if folder is None:
        from nbkit import project_path

        folder = project_path("notebooks") or Path.cwd()
    return Gallery(tuple(papers), frozenset(entry.slug for entry in papers if Path(folder, f"{entry.slug}.ipynb").is_file()))
