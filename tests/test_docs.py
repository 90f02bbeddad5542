"""What the documentation says of the code is generated from it or checked against it. Written anew with: python -m tests.test_docs"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from elastirun.agent.failures import exit_codes
from elastirun.rendezvous.transitions import TRANSITIONS
from elastirun.train.live.phases import ROWS
from tests.test_layers import sources

ROOT = Path(__file__).parent.parent
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/*.md"), *ROOT.glob("deploy/*.md")]
SOURCES = ("agent", "benchmarks", "elastirun", "examples", "rendezvous", "tests")
OTHERS = {"torch/__init__.py", "agent/x.py"}  # named in pages, and not ours
BLOCK = re.compile(r"(<!-- generated: [^\n]*\n)(.*?)(<!-- end -->)", re.S)
LINK = re.compile(r"\]\(([^)#\s]*)(#[^)\s]*)?\)")


def diagram() -> str:
    """All transitions, as a picture and as a table."""
    arrows = "\n".join(f"    {a.value} --> {b.value}: {trigger.value}" for (a, trigger), b in TRANSITIONS.items())
    rows = "\n".join(f"| `{a.value}` | {trigger.value} | `{b.value}` |" for (a, trigger), b in TRANSITIONS.items())
    picture = f"```mermaid\nstateDiagram-v2\n    [*] --> joining\n{arrows}\n    left --> [*]\n```\n"
    return f"\n{picture}\n| a node that is | when | becomes |\n|---|---|---|\n{rows}\n\n"


def phases() -> str:
    """All transitions of a live worker to another phase, as a picture."""
    arrows = dict.fromkeys(f"    {row.phase.name} --> {row.then.name}: {row.event.value}" for row in ROWS if row.then is not row.phase)
    return "\n```mermaid\nstateDiagram-v2\n    [*] --> LEFT\n" + "\n".join(arrows) + "\n```\n\n"


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them, and those that are written out."""
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.S | re.M)
    titles = re.findall(r"^#+ (.*)$", prose, re.M)
    named = re.findall(r'<a id="([^"]+)">', prose)
    return {"#" + re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles} | {f"#{name}" for name in named}


def exit_code_table() -> str:
    rows = "\n".join(f"| {row.code} | {row.meaning} | {row.advice} |" for row in exit_codes.rows())
    return f"\n| code | meaning | what to do |\n|---|---|---|\n{rows}\n\n"


GENERATED = {"rendezvous.md": diagram, "exit-codes.md": exit_code_table, "elastic.md": phases}


@pytest.mark.parametrize("page", GENERATED)
def test_what_a_page_shows_of_the_code_is_what_the_code_says(page: str) -> None:
    found = BLOCK.search((ROOT / "docs" / page).read_text())
    assert found and found[2] == GENERATED[page](), "python -m tests.test_docs writes it anew"


def test_links_lead_to_files_and_headings_that_exist() -> None:
    dead = []
    for page in PAGES:
        for path, anchor in LINK.findall(page.read_text()):
            target = page.parent / path if path else page
            if "://" not in path and not (target.exists() and (not anchor or target.suffix != ".md" or anchor in anchors(target))):
                dead.append(f"{page.name}: {path}{anchor}")
    assert dead == []


def test_figures_of_gpus_are_on_their_page_alone() -> None:
    """Other pages point to a row of docs/gpu.md, which a program writes."""
    assert [page.name for page in PAGES if page.name != "gpu.md" and re.search(r"\b(A100|B200|H100|H200)\b", page.read_text())] == []


def test_source_files_that_pages_name_exist() -> None:
    files = {f"/{path.relative_to(ROOT)}" for top in SOURCES for path in (ROOT / top).rglob("*.py")}
    named = [(page, name) for page in PAGES for name in re.findall(r"`([\w/]+\.py)`", page.read_text())]
    assert [f"{page.name}: {name}" for page, name in named if name not in OTHERS and not any(f.endswith("/" + name) for f in files)] == []


def test_the_index_leads_to_every_page_and_the_readme_leads_to_the_index() -> None:
    index = ROOT / "docs" / "index.md"
    linked = {(index.parent / path).resolve() for path, _ in LINK.findall(index.read_text())}
    assert {page.resolve() for page in PAGES} - linked - {index} == set()
    assert "(docs/index.md)" in (ROOT / "README.md").read_text()


def test_the_map_of_the_folders_says_what_they_say() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text()
    packages = {str(path.parent.relative_to(ROOT)): path for _, path in sources() if path.name == "__init__.py"}
    lines = {name: (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0] for name, path in packages.items()}
    assert [f"{name}: {line}" for name, line in lines.items() if f"| `{name}/` | {line.replace('``', '`')} |" not in page] == []


if __name__ == "__main__":
    for name, generate in GENERATED.items():
        page = ROOT / "docs" / name
        before, head, old, end, after = BLOCK.split(page.read_text(), maxsplit=1)
        page.write_text(before + head + generate() + end + after)
