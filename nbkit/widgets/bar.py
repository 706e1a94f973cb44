"""Front end of a panel: a grid of native form controls with a summary and a status line, and the live figure.

Native controls are used because they carry their name, value and focus ring to keyboards and screen readers, which the
sliders of ipywidgets do not. The script has no dependency, so it works without a network.
"""

from __future__ import annotations

import json
from typing import Any

import anywidget
import plotly.graph_objects as go
import traitlets

_SCRIPT = r"""
let count = 0;
function render({ model, el }) {
  const id = "nbkit-" + Math.random().toString(36).slice(2) + (count++);
  el.classList.add("nbkit-bar");
  el.setAttribute("role", "group");
  el.setAttribute("aria-label", model.get("title") || "controls");
  const make = (tag, cls, parent) => { const e = document.createElement(tag); if (cls) e.className = cls; parent.appendChild(e); return e; };

  const head = make("div", "nbkit-head", el);
  make("span", "nbkit-title", head).textContent = model.get("title");
  const reset = make("button", "nbkit-reset", head);
  reset.type = "button"; reset.textContent = "Reset"; reset.title = "Back to the first values";
  const grid = make("div", "nbkit-grid", el);
  const rows = new Map();

  const send = (name, index) => {
    model.set("indices", { ...model.get("indices"), [name]: index });
    model.save_changes();
  };
  for (const spec of model.get("spec")) {
    const row = make("div", "nbkit-control nbkit-" + spec.kind, grid);
    const label = make("label", "nbkit-label", row);
    label.textContent = spec.label; label.htmlFor = id + spec.name; label.title = spec.help || spec.label;
    let input, out = null;
    if (spec.kind === "choice") {
      input = make("select", "", row);
      spec.texts.forEach((text, i) => {
        const option = make("option", "", input);
        option.value = i; option.textContent = text + (spec.unit ? " " + spec.unit : "");
      });
    } else {
      input = make("input", "", row);
      input.type = spec.kind === "toggle" ? "checkbox" : "range";
      if (spec.kind === "slider") {
        input.min = 0; input.max = spec.texts.length - 1; input.step = 1;
        out = make("output", "nbkit-value", row);
        out.htmlFor = input.id;
      }
    }
    input.id = id + spec.name;
    input.dataset.name = spec.name;
    // The unit is not part of the name: a reader hears it with the value.
    input.setAttribute("aria-label", spec.label);
    if (spec.help) input.title = spec.help;
    const show = (index, text) => {
      if (spec.kind === "toggle") { input.checked = index === 1; return; }
      if (String(index) !== input.value) input.value = index;
      if (out) {
        const shown = text + (spec.unit ? " " + spec.unit : "");
        out.textContent = shown;
        input.setAttribute("aria-valuetext", shown);
        input.style.setProperty("--fill", (100 * index / Math.max(1, spec.texts.length - 1)) + "%");
      }
    };
    input.addEventListener(spec.kind === "choice" || spec.kind === "toggle" ? "change" : "input", () => {
      const index = spec.kind === "toggle" ? Number(input.checked) : Number(input.value);
      show(index, spec.texts[index]);
      send(spec.name, index);
    });
    // JupyterLab has shortcuts on bare keys; a focused control keeps its own.
    input.addEventListener("keydown", (event) => { if (!event.ctrlKey && !event.metaKey && event.key !== "Escape") event.stopPropagation(); });
    rows.set(spec.name, { spec, show });
  }
  reset.addEventListener("click", () => { model.set("indices", { ...model.get("defaults") }); model.save_changes(); sync(); });

  const foot = make("div", "nbkit-foot", el);
  const summary = make("span", "nbkit-summary", foot);
  summary.setAttribute("role", "status"); summary.setAttribute("aria-live", "polite");
  const status = make("span", "nbkit-status", foot);
  const error = make("div", "nbkit-error", el);
  error.setAttribute("role", "alert"); error.setAttribute("aria-live", "assertive");

  function sync() {
    const indices = model.get("indices"), exact = model.get("exact");
    for (const [name, { spec, show }] of rows) show(indices[name], exact[name] ?? spec.texts[indices[name]]);
  }
  function words() {
    summary.textContent = model.get("summary");
    status.textContent = model.get("status");
    error.textContent = model.get("error");
    error.hidden = !model.get("error");
  }
  function scheme() {
    // JupyterLab says which theme it shows; elsewhere the brightness of the page decides.
    let dark;
    const flag = document.body.dataset.jpThemeLight;
    if (flag !== undefined) dark = flag === "false";
    else {
      const rgb = (getComputedStyle(document.body).backgroundColor.match(/[\d.]+/g) || []).map(Number);
      dark = rgb.length >= 3 && rgb[3] !== 0 && (rgb[0] + rgb[1] + rgb[2]) / 3 < 110;
    }
    el.classList.toggle("nbkit-dark", dark);
    if (dark !== model.get("dark")) { model.set("dark", dark); model.save_changes(); }
  }
  sync(); words(); scheme();
  model.on("change:indices", sync); model.on("change:exact", sync);
  model.on("change:summary", words); model.on("change:status", words); model.on("change:error", words);
  // A figure drawn before its cell has a width keeps a default one; plotly looks again when the window is resized.
  let tried = "";
  const fit = new ResizeObserver(() => {
    const plot = el.closest(".nbkit-panel")?.querySelector(".js-plotly-plot");
    const drawn = plot?.querySelector(".main-svg")?.clientWidth;
    if (!drawn || Math.abs(drawn - plot.clientWidth) < 3 || tried === drawn + "/" + plot.clientWidth) return;
    tried = drawn + "/" + plot.clientWidth;
    requestAnimationFrame(() => window.dispatchEvent(new Event("resize")));
  });
  const attach = (tries) => {
    const panel = el.closest(".nbkit-panel");
    if (panel) fit.observe(panel);
    else if (tries > 0) setTimeout(attach, 100, tries - 1);
  };
  attach(50);
  const watch = new MutationObserver(scheme);
  watch.observe(document.body, { attributes: true, attributeFilter: ["data-jp-theme-light", "class"] });
  return () => { watch.disconnect(); fit.disconnect(); model.off("change:indices", sync); model.off("change:exact", sync);
    model.off("change:summary", words); model.off("change:status", words); model.off("change:error", words); };
}
export default { render };
"""

_STYLE = """
.nbkit-bar { --ink: #1f2328; --soft: #57606a; --line: #d0d7de; --page: #f6f8fa; --field: #ffffff; --accent: #0072B2; --bad: #a40e26;
  --bad-page: #ffebe9; box-sizing: border-box; width: 100%; padding: 10px 14px 8px; color: var(--ink); background: var(--page);
  border: 1px solid var(--line);
  border-bottom: 0; border-radius: 8px 8px 0 0; font: 14px/1.35 system-ui, "Segoe UI", "DejaVu Sans", sans-serif; }
.nbkit-bar.nbkit-dark { --ink: #e6edf3; --soft: #9da7b3; --line: #30363d; --page: #191e24; --field: #0d1117; --accent: #56B4E9; --bad: #ffb3ad;
  --bad-page: #4c1519; color-scheme: dark; }
.nbkit-head { display: flex; justify-content: space-between; align-items: center; gap: 12px; margin-bottom: 6px; }
.nbkit-title { font-weight: 650; font-size: 16px; }
.nbkit-reset { font: inherit; font-size: 13px; color: var(--soft); background: none; border: 1px solid var(--line); border-radius: 6px;
  padding: 1px 10px; cursor: pointer; }
.nbkit-reset:hover { color: var(--ink); border-color: var(--soft); }
.nbkit-grid { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(185px, 100%), 1fr)); gap: 4px 22px; align-items: end; }
.nbkit-control { display: grid; grid-template-columns: 1fr auto; column-gap: 8px; align-items: center; min-width: 0; }
.nbkit-label { overflow-wrap: anywhere; color: var(--soft); }
.nbkit-value { grid-area: 1 / 2; font-variant-numeric: tabular-nums; font-weight: 600; white-space: nowrap; }
.nbkit-slider input { grid-column: 1 / -1; width: 100%; margin: 0; height: 22px; appearance: none; background: transparent; cursor: pointer; }
.nbkit-slider input::-webkit-slider-runnable-track { height: 6px; border-radius: 3px;
  background: linear-gradient(to right, var(--accent) var(--fill, 0%), var(--line) var(--fill, 0%)); }
.nbkit-slider input::-moz-range-track { height: 6px; border-radius: 3px; background: var(--line); }
.nbkit-slider input::-moz-range-progress { height: 6px; border-radius: 3px; background: var(--accent); }
.nbkit-slider input::-webkit-slider-thumb { appearance: none; width: 18px; height: 18px; margin-top: -6px; border-radius: 50%;
  background: var(--accent);
  border: 2px solid var(--field); box-shadow: 0 0 0 1px var(--accent); }
.nbkit-slider input::-moz-range-thumb { width: 15px; height: 15px; border-radius: 50%; background: var(--accent); border: 2px solid var(--field); }
.nbkit-choice select { grid-column: 1 / -1; width: 100%; font: inherit; color: var(--ink); background: var(--field); border: 1px solid var(--line);
  border-radius: 6px; padding: 2px 6px; height: 28px; }
.nbkit-toggle { grid-template-columns: auto 1fr; min-height: 28px; align-self: end; }
.nbkit-toggle label { order: 2; }
.nbkit-toggle input { width: 18px; height: 18px; margin: 0; accent-color: var(--accent); }
.nbkit-slider input:focus-visible { outline: none; }
.nbkit-slider input:focus-visible::-webkit-slider-thumb { box-shadow: 0 0 0 2px var(--field), 0 0 0 5px var(--accent); }
.nbkit-slider input:focus-visible::-moz-range-thumb { box-shadow: 0 0 0 2px var(--field), 0 0 0 5px var(--accent); }
.nbkit-slider:focus-within .nbkit-label { color: var(--ink); text-decoration: underline; text-underline-offset: 3px; }
.nbkit-bar :is(select, button, input[type=checkbox]):focus-visible { outline: 3px solid var(--accent); outline-offset: 2px; border-radius: 6px; }
.nbkit-foot { display: flex; flex-wrap: wrap; justify-content: space-between; gap: 2px 16px; margin-top: 8px; padding-top: 6px;
  border-top: 1px solid var(--line); }
.nbkit-summary { flex: 1 1 320px; min-height: 1.35em; }
.nbkit-status { color: var(--soft); font-variant-numeric: tabular-nums; white-space: nowrap; }
.nbkit-error { margin-top: 6px; padding: 6px 10px; border-radius: 6px; color: var(--bad); background: var(--bad-page); white-space: pre-wrap;
  overflow-wrap: anywhere; }
.nbkit-error[hidden] { display: none; }
.nbkit-panel .nbkit-figure { border: 1px solid #d0d7de; border-top: 0; border-radius: 0 0 8px 8px; overflow: hidden; }
.nbkit-panel:has(.nbkit-dark) .nbkit-figure { border-color: #30363d; }
"""


class ControlBar(anywidget.AnyWidget):
    """Controls, summary and status of one panel. `indices`: position of every control; `exact`: shown text of a value off its grid."""

    _esm = _SCRIPT
    _css = _STYLE
    title = traitlets.Unicode().tag(sync=True)
    spec = traitlets.List().tag(sync=True)
    indices = traitlets.Dict().tag(sync=True)
    defaults = traitlets.Dict().tag(sync=True)
    exact = traitlets.Dict().tag(sync=True)
    summary = traitlets.Unicode().tag(sync=True)
    status = traitlets.Unicode().tag(sync=True)
    error = traitlets.Unicode().tag(sync=True)
    dark = traitlets.Bool(False).tag(sync=True)


def _once(script: str) -> str:
    """The module ``script``, evaluated once a page however many widgets bring it: a string is read far faster than five megabytes of code."""
    return f"""const source = {json.dumps(script)};
const shared = (globalThis.nbkitFigure ??= import(URL.createObjectURL(new Blob([source], {{ type: "text/javascript" }}))));
export default async () => {{
  const found = (await shared).default;
  return typeof found === "function" ? await found() : found;
}};
"""


class LiveFigure(go.FigureWidget):
    """A FigureWidget that reaches the front end whole.

    anywidget gives a widget two seconds to come up, which the fourth copy of plotly's script on a page can miss on a slow machine; here all figures
    share one.

    plotly's own opens its channel first, empty, and sends data and layout afterwards; a front end that is still loading the
    five megabytes of script by then shows empty axes for good. Here nothing is sent before `open()`.
    """

    _esm = _once(str(go.FigureWidget._esm))
    _complete = False

    def __init__(self, figure: dict[str, Any], config: dict[str, Any]):
        super().__init__(figure)
        self._config = self._config | config
        self.add_class("nbkit-figure")
        self._complete = True
        self.open()

    def open(self) -> None:
        """Send the whole state, once it is complete."""
        if self._complete:
            super().open()
