"""The static site: pages that need no kernel and no network, with formulas, pictures and sliders alive."""

import json
import re

import pytest
from notebook_checks import executed_sample

import nbkit
from nbkit.errors import InputError, RunError
from nbkit.widgets import site


@pytest.fixture(scope="module")
def executed(tmp_path_factory):
    return executed_sample(tmp_path_factory).parent


def test_page_holds_text_formulas_code_pictures_and_live_figures(executed, tmp_path):
    pages = site.build(executed, tmp_path)
    assert [page.name for page in pages] == ["index.html", "sample.html"] and (tmp_path / "plotly.min.js").stat().st_size > 1e6
    page = (tmp_path / "sample.html").read_text(encoding="utf-8")
    assert page.count("<math") == 3 and "<mfrac>" in page and "$" not in re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)
    assert 'alt="The mean energy falls as the damping grows."' in page and "data:image/png;base64," in page
    assert "nbkit-claims" in page and "nbkit-stamp" in page and "<table>" in page
    assert page.count('class="plot"') == 1, "one figure for the panel, none for the widget"
    spec = json.loads(re.search(r'<script type="application/json" id="[^"]+">(.*?)</script>', page, re.DOTALL)[1])
    assert 3 <= len(spec["frames"]) <= 50 and len(spec["layout"]["sliders"][0]["steps"]) == len(spec["frames"])
    assert len(page) < site.MAX_PAGE_BYTES and 'href="sample.html"' in (tmp_path / "index.html").read_text(encoding="utf-8")
    assert not re.search(r"""(src|href)=["']?(https?:)?//""", page)


def page_of(tmp_path, *outputs, text="Some text.", name="page"):
    cells = [{"cell_type": "markdown", "source": text}, {"cell_type": "code", "source": "1", "outputs": list(outputs)}]
    (tmp_path / "in").mkdir(exist_ok=True)
    (tmp_path / "in" / f"{name}.ipynb").write_text(json.dumps({"cells": cells}))
    site.build(tmp_path / "in", tmp_path / "out")
    return (tmp_path / "out" / f"{name}.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("bad", [
    '<img src="https://example.org/x.png">', "<script src=//cdn.example.org/a.js></script>", "<link rel=stylesheet href='http://example.org/a.css'>",
    "<style>@import 'a.css'</style>", "<p style='background:url(https://example.org/a.png)'>x</p>",
])
def test_an_output_that_would_load_from_elsewhere_is_refused(bad, tmp_path):
    with pytest.raises(RunError, match="ask the network for nothing"):
        page_of(tmp_path, {"output_type": "display_data", "data": {"text/html": bad}})


def test_text_is_escaped_and_links_between_notebooks_lead_to_pages(tmp_path):
    page_of(tmp_path, name="other")
    stream = {"output_type": "stream", "name": "stdout", "text": "\x1b[31m<b>&\x1b[0m\n 10%|#\r100%|##########\n"}
    page = page_of(tmp_path, stream, text="See [other](other.ipynb), [gone](gone.ipynb) and [web](https://example.org).\n\n`$5` costs $$x < y$$")
    assert "&lt;b&gt;&amp;\n100%|##########" in page and 'href="other.html"' in page and 'href="gone.ipynb"' in page
    assert "<code>$5</code>" in page and "<math" in page


def test_a_closing_script_tag_inside_the_data_does_not_end_the_page(tmp_path):
    spec = {"data": [{"type": "scatter", "y": [1], "text": ["</script><p id=out>"]}], "layout": {"meta": {"alt": "A point."}}}
    page = page_of(tmp_path, {"output_type": "display_data", "data": {"application/vnd.plotly.v1+json": spec}})
    assert "</script><p id=out>" not in page and 'aria-label="A point."' in page


def test_a_formula_that_cannot_be_converted_is_shown_as_its_source():
    assert site.formula(r"\frac{1}{2}").startswith("<math")
    assert site.formula(r"\frac{1") in ('<code class="tex">\\frac{1</code>',) or "<math" in site.formula(r"\frac{1")
    assert r"\begin{nothing" in site.formula(r"\begin{nothing")


def test_empty_folder_and_heavy_page_are_clear_errors(tmp_path):
    with pytest.raises(InputError, match="python -m nbkit run"):
        site.build(tmp_path, tmp_path / "out")
    with pytest.raises(RunError, match="allowed <= 1.5 MB"):
        page_of(tmp_path, {"output_type": "stream", "name": "stdout", "text": "x" * 1_600_000})


def test_build_path_is_untouched(executed, tmp_path):
    before = sorted(executed.iterdir())
    site.build(executed, tmp_path)
    assert sorted(executed.iterdir()) == before and not nbkit.build_path("site", "sample.html").exists()


def test_index_lists_only_the_pages_its_own_text_does_not_link(tmp_path):
    (tmp_path / "in").mkdir()
    for name, text in (("index", "# All\n\n[one](one.ipynb)"), ("one", "# First"), ("two", "# Second")):
        (tmp_path / "in" / f"{name}.ipynb").write_text(json.dumps({"cells": [{"cell_type": "markdown", "source": text}]}))
    site.build(tmp_path / "in", tmp_path / "out")
    body = (tmp_path / "out" / "index.html").read_text(encoding="utf-8").partition("<main")[2]
    assert body.count('href="one.html"') == 1 and body.count('href="two.html"') == 1 and "Second" in body
