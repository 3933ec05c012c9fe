"""Pictures of the documentation show what the documentation says."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ASSETS = ROOT / "docs" / "assets"


@pytest.fixture
def draw_speeds(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import draw_speeds

    return draw_speeds


def test_picture_of_speeds_has_the_figures_of_the_page(draw_speeds) -> None:
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    assert draw_speeds.PICTURE.read_text(encoding="utf-8") == draw_speeds.drawing(page), "run tools/draw_speeds.py"
    found = {bar.label: draw_speeds.figures(page, bar) for bar in draw_speeds.BARS}
    assert found["LoRA, 32B, exact, 24 GB allowed *"] == (0.98, "17.0 GB")
    ratios = [ratio for ratio, _ in found.values()]
    for name in ("README.md", "docs/index.md", "docs/benchmarks.md"):
        text = (ROOT / name).read_text(encoding="utf-8")
        assert f"![Speed beside plain PyTorch: bars from {min(ratios):g} to {max(ratios):g}](" in text


@pytest.mark.parametrize("picture", [pytest.param(path, id=path.name) for path in sorted(ASSETS.glob("*.svg"))])
def test_picture_is_a_drawing_that_needs_no_other_file(picture: Path) -> None:
    root = ElementTree.parse(picture).getroot()
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert root.get("viewBox") is not None
    assert not any("href" in name for element in root.iter() for name in element.attrib)
