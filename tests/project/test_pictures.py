"""The pictures of the documentation: all are made by `make pictures`, small, and shown in a page."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PICTURES = ROOT / "docs" / "pictures"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def parsed(script: str) -> ast.Module:
    return ast.parse((ROOT / "docs" / script).read_text(encoding="utf-8"))


def made() -> set[str]:
    """Return the names of the files that the scripts make, without running them."""
    drawn = [node for node in ast.walk(parsed("draw_figures.py")) if isinstance(node, ast.AnnAssign)]
    (commands,) = (node.value for node in drawn if ast.unparse(node.target) == "COMMANDS")
    assert isinstance(commands, ast.Dict)
    module = parsed("make_pictures.py")
    calls = [node for node in ast.walk(module) if isinstance(node, ast.Call) and ast.unparse(node.func) == "Picture"]
    names = {f"{ast.literal_eval(key)}.png" for key in commands.keys if key is not None}
    for call in calls:
        given = {word.arg: word.value for word in call.keywords}
        name, themes = ast.literal_eval(given["name"]), given.get("themes")
        names |= {f"{name}.png"} if themes is not None else {f"{name}-light.png", f"{name}-dark.png"}
    return names


def test_each_picture_is_made_by_the_script_and_small():
    sizes = {path.name: path.stat().st_size for path in PICTURES.iterdir()}

    assert made() == set(sizes)
    assert {} == {name: size for name, size in sizes.items() if size >= 300_000}


def test_each_picture_is_shown_and_exists():
    shown = {name for page in PAGES for name in re.findall(r"pictures/([\w-]+\.png)", page.read_text(encoding="utf-8"))}

    assert made() == shown


def test_readme_begins_with_the_run_of_the_demo_in_both_themes():
    first = (ROOT / "README.md").read_text(encoding="utf-8").partition("\n## ")[0]

    assert '<source media="(prefers-color-scheme: dark)" srcset="docs/pictures/demo-dark.png">' in first
    assert 'src="docs/pictures/demo-light.png"' in first
