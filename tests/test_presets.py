"""The preset says what it is, follows the environment, and hides no size."""

import dataclasses

import pytest

from nbkit.errors import InputError
from nbkit.presets import Preset, preset


@pytest.mark.parametrize("setting, name, size", [
    (None, "demo", 16), ("", "demo", 16), ("smoke", "smoke", 4), ("demo", "demo", 16), ("full", "full", 200),
])
def test_environment_chooses(monkeypatch, setting, name, size):
    if setting is None:
        monkeypatch.delenv("NBKIT_PRESET", raising=False)
    else:
        monkeypatch.setenv("NBKIT_PRESET", setting)
    assert preset().name == name
    assert preset().pick(smoke=4, demo=16, full=200) == size


def test_read_at_each_call(monkeypatch):
    monkeypatch.setenv("NBKIT_PRESET", "smoke")
    before = preset()
    monkeypatch.setenv("NBKIT_PRESET", "full")
    assert (before.name, preset().name) == ("smoke", "full")


@pytest.mark.parametrize("name", ["Smoke", "large", "demo "])
def test_unknown_name(monkeypatch, name):
    monkeypatch.setenv("NBKIT_PRESET", name)
    with pytest.raises(InputError, match="NBKIT_PRESET.*smoke, demo, full"):
        preset()


def test_every_size_must_be_given():
    with pytest.raises(TypeError):
        Preset("smoke").pick(smoke=1, demo=2)


def test_repr_names_it_and_says_how_to_change_it():
    assert "preset smoke" in repr(Preset("smoke")) and "NBKIT_PRESET" in repr(Preset("smoke"))


def test_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Preset("smoke").name = "full"
