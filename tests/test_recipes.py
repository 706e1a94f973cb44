"""The registry of recipes: known outputs, resumed work, clear errors."""

from __future__ import annotations

import json
import sys
import types

import pytest

import nbkit
from nbkit import recipes
from nbkit.errors import InputError, RunError
from nbkit.recipes import RECIPES, Recipe


@pytest.fixture
def out(tmp_path, monkeypatch):
    monkeypatch.setenv("NBKIT_DATA", str(tmp_path / "out"))
    return tmp_path / "out"


@pytest.fixture
def counting(monkeypatch):
    """A recipe of three steps that stops once in the middle."""
    module = types.ModuleType("nbkit_counting_recipe")
    done = []

    def run(work_dir, out_dir, log):
        state = work_dir / "step"
        for step in range(int(state.read_text()) if state.exists() else 0, 3):
            if step == 2 and len(done) == 2:
                done.append("stopped")
                raise KeyboardInterrupt
            done.append(step)
            state.write_text(str(step + 1))
            log(f"step {step}")
        (out_dir / "models").mkdir(exist_ok=True)
        (out_dir / "models" / "count.json").write_text("3")

    module.run = run
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(RECIPES, "count", Recipe("count", "counts", ("models/count.json",), 0.1, f"{module.__name__}:run"))
    return done


def test_interrupted_recipe_goes_on(tmp_path, out, counting):
    lines = []
    with pytest.raises(KeyboardInterrupt):
        recipes.train("count", work=tmp_path / "work", log=lines.append)
    assert not (out / "models").exists()
    made = recipes.train("count", work=tmp_path / "work", log=lines.append)
    # No step is done twice.
    assert counting == [0, 1, "stopped", 2] and lines == ["step 0", "step 1", "step 2"]
    assert made == [out / "models" / "count.json"] and made[0].read_text() == "3"


def test_recipe_without_its_output_is_an_error(tmp_path, out, monkeypatch):
    module = types.ModuleType("nbkit_empty_recipe")
    module.run = lambda work_dir, out_dir, log: None
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(RECIPES, "empty", Recipe("empty", "makes nothing", ("x.json",), 0.1, f"{module.__name__}:run"))
    with pytest.raises(RunError, match=r"empty ended without .*x\.json"):
        recipes.train("empty", work=tmp_path / "work")


def test_unknown_recipe():
    with pytest.raises(InputError, match="allowed .*lookup-chain"):
        recipes.get("nope")


@pytest.mark.parametrize("recipe", list(RECIPES.values()), ids=list(RECIPES))
def test_registered_recipes(recipe):
    assert callable(recipe.load())
    assert recipe.outputs and recipe.minutes > 0 and recipe.summary
    # What the project ships is what the recipe says it makes, and its card names the recipe.
    for output in recipe.outputs:
        card = json.loads((nbkit.data_path(output) / "card.json").read_text(encoding="utf-8"))
        assert card["recipe"] == recipe.name


def test_every_shipped_file_has_a_recipe_and_is_small():
    data = nbkit.project_path("data")
    made = {data / output for recipe in RECIPES.values() for output in recipe.outputs}
    shipped = [path for path in data.rglob("*") if path.is_file()]
    readme = nbkit.project_path("README.md").read_text(encoding="utf-8")
    # Pictures are screenshots for README, which is what they are there for.
    made |= {path for path in shipped if path.parent.name == "pictures" and f"data/pictures/{path.name}" in readme}
    assert [str(path) for path in shipped if not made & {path, *path.parents}] == []
    assert {path.name: path.stat().st_size for path in shipped if path.stat().st_size > 12 * 2**20} == {}
