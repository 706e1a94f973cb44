"""Static pages of executed notebooks: readable from a folder, without a kernel, a server or a network.

Each page holds the text, code and outputs of one notebook; panels are alive through the frames that `Panel.static` precomputed.
plotly.js lies once beside the pages, formulas are MathML, pictures are embedded, and a content policy in every page forbids
whatever else might be asked for.
"""

from __future__ import annotations

import html
import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nbkit.errors import InputError, RunError
from nbkit.notebooks import INDEX

# One page, plotly.js apart: what a phone loads at once.
MAX_PAGE_BYTES = 1_500_000
_PLOTLY = "application/vnd.plotly.v1+json"
_VIEW = "application/vnd.jupyter.widget-view+json"
_COLOUR_CODE = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_LINK = re.compile(r'href="(?:\./)?([\w-]+)\.ipynb(#[^"]*)?"')
_FOREIGN = re.compile(
    r"""<(?:script|img|iframe|source|video|audio|embed|input|link|object)\b[^>]*?\b(?:src|href|data)\s*=\s*["']?\s*(?:https?:)?//"""
    r"""|url\(\s*["']?\s*(?:https?:)?//|@import\b""",
    re.IGNORECASE,
)
_POLICY = (
    "default-src 'none'; script-src 'self' 'unsafe-inline' file:; style-src 'unsafe-inline'; img-src data: blob:; font-src data:; connect-src 'none'"
)

_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>{title}</title>
<link rel="icon" href="data:,">
<style>{style}</style>
{head}
</head>
<body>
<a class="skip" href="#content">Skip to the text</a>
<nav aria-label="Notebooks">{nav}</nav>
<main id="content">
{body}
</main>
{tail}
</body>
</html>
"""
_STYLE = """
:root { --ink: #1f2328; --soft: #57606a; --line: #d0d7de; --page: #ffffff; --code: #f6f8fa; --accent: #0072B2; color-scheme: light; }
* { box-sizing: border-box; }
body { margin: 0; color: var(--ink); background: var(--page); font: 17px/1.6 system-ui, "Segoe UI", "DejaVu Sans", sans-serif; }
nav { display: flex; flex-wrap: wrap; gap: 4px 16px; padding: 10px max(20px, calc(50vw - 480px)); border-bottom: 1px solid var(--line);
  font-size: 15px; background: var(--code); }
nav a[aria-current] { color: var(--ink); font-weight: 650; text-decoration: none; }
main { max-width: 1000px; margin: 0 auto; padding: 12px 20px 80px; }
a { color: var(--accent); }
.skip { position: absolute; left: -999px; } .skip:focus { left: 8px; top: 8px; background: var(--page); padding: 4px 8px; z-index: 2; }
h1, h2, h3 { line-height: 1.25; margin: 1.6em 0 .5em; } h1 { font-size: 2em; margin-top: .8em; }
pre { margin: 0; overflow-x: auto; font: 14px/1.5 ui-monospace, "Cascadia Mono", "DejaVu Sans Mono", monospace; }
code { font-family: ui-monospace, "Cascadia Mono", "DejaVu Sans Mono", monospace; font-size: .9em; background: var(--code);
  border-radius: 4px; padding: .1em .3em; }
pre code { background: none; padding: 0; font-size: inherit; }
.code { margin: 10px 0; border: 1px solid var(--line); border-radius: 6px; background: var(--code); }
.code > summary { cursor: pointer; padding: 4px 12px; font-size: 14px; color: var(--soft); }
.code pre { padding: 8px 12px 10px; }
.output { margin: 8px 0; overflow-x: auto; }
.output pre.text { padding: 2px 12px; white-space: pre-wrap; }
.output pre.stderr, .output pre.error { background: #ffebe9; padding: 8px 12px; border-radius: 6px; }
.output img { max-width: 100%; height: auto; }
figure { margin: 12px 0; } figcaption { color: var(--soft); font-size: 15px; margin-top: 2px; }
.plot { width: 100%; } .plot:focus-visible { outline: 3px solid var(--accent); outline-offset: -3px; }
.name { font-weight: 650; }
table { border-collapse: collapse; margin: 10px 0; font-size: 15px; }
th, td { border: 1px solid var(--line); padding: 4px 10px; text-align: left; vertical-align: top; }
th { background: var(--code); } caption { text-align: left; color: var(--soft); padding: 4px 0; }
blockquote { margin: 12px 0; padding: 2px 16px; border-left: 4px solid var(--line); color: var(--soft); }
math { font-size: 1.08em; } .formula { overflow-x: auto; padding: 4px 0; } .tex { color: var(--soft); }
.nbkit-sweep { color: var(--soft); font-size: 15px; } .nbkit-caption { display: none; }
.cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(240px, 1fr)); gap: 12px; padding: 0; list-style: none; }
.cards a { display: block; padding: 12px 14px; border: 1px solid var(--line); border-radius: 8px; text-decoration: none; font-weight: 600; }
"""
# Draws a figure when it comes near the screen; the caption follows the slider.
_DRAW = """
const draw = (box) => {
  const spec = JSON.parse(document.getElementById(box.dataset.spec).textContent);
  Plotly.newPlot(box, {data: spec.data, layout: {...spec.layout, autosize: true}, frames: spec.frames || [], config: spec.config || {}}).then(() => {
    const caption = box.parentElement.querySelector("figcaption");
    const say = () => {
      const alt = box.layout.meta && box.layout.meta.alt;
      if (alt && caption) { caption.textContent = alt; box.setAttribute("aria-label", alt); }
    };
    const steps = (spec.layout.sliders || [{}])[0].steps || [];
    if (steps.length) keys(box, spec.layout.sliders[0], say);
    box.on("plotly_animated", say);
    box.dataset.drawn = "1";
  });
};
// The slider that plotly draws does not take the keyboard: the figure itself does.
const keys = (box, slider, say) => {
  box.tabIndex = 0; box.setAttribute("role", "slider");
  box.setAttribute("aria-valuemin", 0); box.setAttribute("aria-valuemax", slider.steps.length - 1);
  const name = slider.currentvalue || {};
  const show = (active) => { box.setAttribute("aria-valuenow", active);
    box.setAttribute("aria-valuetext", (name.prefix || "") + slider.steps[active].label + (name.suffix || "")); };
  show(slider.active || 0);
  box.on("plotly_sliderchange", (event) => show(event.slider.active));
  box.addEventListener("keydown", (event) => {
    const now = box.layout.sliders[0].active || 0, last = slider.steps.length - 1;
    const to = {ArrowRight: now + 1, ArrowUp: now + 1, ArrowLeft: now - 1, ArrowDown: now - 1, Home: 0, End: last}[event.key];
    if (to === undefined || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    const next = Math.min(last, Math.max(0, to));
    if (next === now) return;
    show(next);
    Plotly.relayout(box, {"sliders[0].active": next}).then(() => Plotly.animate(box, ...slider.steps[next].args)).then(say);
  });
};
const near = new IntersectionObserver((entries) => entries.forEach((e) => { if (e.isIntersecting) { near.unobserve(e.target); draw(e.target); } }),
  {rootMargin: "400px"});
document.querySelectorAll(".plot").forEach((box) => near.observe(box));
"""


def build(executed: str | Path, out: str | Path) -> list[Path]:
    """Write a page for every executed notebook in `executed`, plotly.js and index.html into `out`; returns the pages.

    Raises: InputError when there is nothing to export; RunError when an output would load something from elsewhere.
    """
    executed, out = Path(executed), Path(out)
    notebooks = sorted(executed.glob("*.ipynb"), key=lambda p: (p.stem != INDEX, p.stem))
    if not notebooks:
        raise InputError("executed notebooks", got=f"none in {executed}", allowed="one or more .ipynb files", hint="python -m nbkit run")
    out.mkdir(parents=True, exist_ok=True)
    books = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in notebooks}
    titles = {name: _title(book, name) for name, book in books.items()}
    pages, needs_plotly = [], False
    for name, book in books.items():
        body = _body(book, set(books))
        if name == INDEX:
            # The gallery links to most pages already.
            body += _cards({other: title for other, title in titles.items() if f'href="{other}.html"' not in body})
        pages.append(_write(out, name, titles, body))
        needs_plotly |= 'class="plot"' in body
    if INDEX not in books:
        pages.insert(0, _write(out, INDEX, titles, "<h1>Notebooks</h1>" + _cards(titles)))
    if needs_plotly:
        from plotly.offline import get_plotlyjs

        (out / "plotly.min.js").write_text(get_plotlyjs(), encoding="utf-8")
    return pages


def _write(out: Path, name: str, titles: Mapping[str, str], body: str) -> Path:
    found = _FOREIGN.search(body)
    if found:
        raise RunError(f"page {name}", got=f"an output that loads {found.group(0)[:80]!r}", allowed="pages that ask the network for nothing",
                       hint="embed the data in the output")
    links = {INDEX: "Overview"} | {n: n.replace("_", " ") for n in titles if n != INDEX}
    nav = "".join(f'<a href="{n}.html"{" aria-current=page" if n == name else ""}>{html.escape(text)}</a>' for n, text in links.items())
    live = 'class="plot"' in body
    page = _PAGE.format(
        policy=_POLICY, title=html.escape(titles.get(name, "Notebooks")), style=_STYLE + _code_style(), nav=nav, body=body,
        head='<script src="plotly.min.js" defer></script>' if live else "",
        tail=f'<script>window.addEventListener("DOMContentLoaded", () => {{{_DRAW}}});</script>' if live else "",
    )
    if len(page.encode()) > MAX_PAGE_BYTES:
        raise RunError(f"page {name}", got=f"{len(page.encode()) / 1e6:.1f} MB", allowed=f"<= {MAX_PAGE_BYTES / 1e6:g} MB",
                       hint="fewer steps or points in the panels (Panel.static), or smaller pictures")
    path = out / f"{name}.html"
    partial = path.with_suffix(".part")
    partial.write_text(page, encoding="utf-8")
    shutil.move(partial, path)
    return path


def _cards(titles: Mapping[str, str]) -> str:
    items = "".join(f'<li><a href="{name}.html">{html.escape(title)}</a></li>' for name, title in titles.items() if name != INDEX)
    return f'<h2>Pages</h2><ul class="cards">{items}</ul>' if items else ""


def _title(book: Mapping[str, Any], name: str) -> str:
    for cell in book.get("cells", []):
        if cell.get("cell_type") == "markdown":
            found = re.search(r"^#\s+(.+)$", _joined(cell.get("source", "")), re.MULTILINE)
            if found:
                return re.sub(r"[`*_$]", "", found.group(1)).strip()
    return name


def _body(book: Mapping[str, Any], names: set[str]) -> str:
    parts = []
    for cell in book.get("cells", []):
        source = _joined(cell.get("source", ""))
        if cell.get("cell_type") == "markdown":
            page = markdown(source)
            # Links between notebooks become links between pages.
            page = _links(page, names)
            parts.append(f'<section class="prose">{page}</section>')
        elif cell.get("cell_type") == "code":
            if source.strip():
                lines = source.rstrip().count("\n") + 1
                parts.append(f'<details class="code"><summary>Code ({lines} line{"s" if lines > 1 else ""})</summary>{_highlight(source)}</details>')
            parts.extend(_links(_output(output, f"{len(parts)}-{k}"), names) for k, output in enumerate(cell.get("outputs", [])))
    return "\n".join(part for part in parts if part)


def _links(page: str, names: set[str]) -> str:
    """Links between notebooks become links between pages, in the text and in what cells show, such as the gallery of the index."""
    return _LINK.sub(lambda m: f'href="{m[1]}.html{m[2] or ""}"' if m[1] in names else m[0], page)


def _output(output: Mapping[str, Any], key: str) -> str:
    kind = output.get("output_type")
    if kind == "stream":
        text = _COLOUR_CODE.sub("", _joined(output.get("text", "")))
        # A progress bar rewrites its line: only the last state is worth reading.
        text = "\n".join(line.rsplit("\r", 1)[-1] if not line.endswith("\r") else line.rstrip("\r").rsplit("\r", 1)[-1] for line in text.split("\n"))
        return f'<div class="output"><pre class="text {html.escape(output.get("name", ""))}">{html.escape(text)}</pre></div>' if text.strip() else ""
    if kind == "error":
        text = _COLOUR_CODE.sub("", "\n".join(output.get("traceback", [])))
        return f'<div class="output"><pre class="error">{html.escape(text)}</pre></div>'
    data, note = output.get("data", {}), output.get("metadata", {}).get("nbkit", {})
    if _VIEW in data or note.get("caption"):
        return ""  # the static figure beside the widget, and the figure's own caption, say it all
    if _PLOTLY in data:
        return _plot(data[_PLOTLY], note, key)
    if "image/png" in data:
        alt = html.escape(note.get("alt", ""))
        png = re.sub(r"\s", "", _joined(data["image/png"]))
        return f'<figure class="output"><img alt="{alt}" src="data:image/png;base64,{png}"><figcaption>{alt}</figcaption></figure>'
    if "image/svg+xml" in data:
        return f'<div class="output">{_joined(data["image/svg+xml"])}</div>'
    if "text/html" in data:
        return f'<div class="output">{_joined(data["text/html"])}</div>'
    if "text/markdown" in data:
        return f'<div class="output">{markdown(_joined(data["text/markdown"]))}</div>'
    text = _joined(data.get("text/plain", ""))
    return f'<div class="output"><pre class="text">{html.escape(text)}</pre></div>' if text else ""


def _plot(spec: Mapping[str, Any], note: Mapping[str, Any], key: str) -> str:
    layout = spec.get("layout", {})
    alt = html.escape(note.get("alt") or (layout.get("meta") or {}).get("alt", ""))
    height = layout.get("height") or 460
    # "</" would end the script element early.
    packed = json.dumps(spec, separators=(",", ":")).replace("</", "<\\/")
    title = f'<div class="name">{html.escape(note["panel"])}</div>' if note.get("panel") else ""
    return (f'<figure class="output">{title}<div class="plot" role="img" aria-label="{alt}" data-spec="spec-{key}" '
            f'style="min-height:{int(height)}px"></div>'
            f'<figcaption>{alt}</figcaption><script type="application/json" id="spec-{key}">{packed}</script></figure>')


def formula(tex: str, *, block: bool = False) -> str:
    """TeX as MathML, which browsers draw by themselves; a formula that cannot be converted is shown as its TeX source.

    >>> formula("x^2")[:5]
    '<math'
    """
    from latex2mathml.converter import convert

    try:
        math = convert(tex.strip(), display="block" if block else "inline")
    except Exception:  # the converter has no common error class; a reader prefers the source to no page
        math = f'<code class="tex">{html.escape(tex.strip())}</code>'
    return f'<div class="formula">{math}</div>' if block else math


def markdown(text: str) -> str:
    """HTML of a text cell; formulas between dollar signs become MathML.

    >>> markdown("**bold**")
    '<p><strong>bold</strong></p>'
    """
    import mistune

    class Renderer(mistune.HTMLRenderer):
        def block_code(self, code: str, info: str | None = None) -> str:
            return f'<div class="code">{_highlight(code, (info or "text").split()[0])}</div>'

        def inline_math(self, text: str) -> str:
            return formula(text)

        def block_math(self, text: str) -> str:
            return formula(text, block=True)

    renderer = Renderer(escape=False)
    return mistune.create_markdown(renderer=renderer, plugins=["table", "strikethrough", "footnotes", "math", "url"])(text).strip()


def _highlight(code: str, language: str = "python") -> str:
    from pygments import highlight
    from pygments.formatters import HtmlFormatter
    from pygments.lexers import TextLexer, get_lexer_by_name
    from pygments.util import ClassNotFound

    try:
        lexer = get_lexer_by_name(language)
    except ClassNotFound:
        lexer = TextLexer()
    return highlight(code.rstrip(), lexer, HtmlFormatter(cssclass="highlight", wrapcode=True))


def _code_style() -> str:
    from pygments.formatters import HtmlFormatter

    return HtmlFormatter(style="default", cssclass="highlight").get_style_defs(".highlight").replace("background: #f8f8f8;", "")


def _joined(text: str | list[str]) -> str:
    return text if isinstance(text, str) else "".join(text)
