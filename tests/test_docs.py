"""What the documentation says of the code is generated from it. Written anew with: python -m tests.test_docs"""

from __future__ import annotations

import re
from pathlib import Path

from elastirun.rendezvous.transitions import TRANSITIONS

PAGE = Path(__file__).parent.parent / "docs" / "rendezvous.md"
BLOCK = re.compile(r"(<!-- generated: [^\n]*\n)(.*?)(<!-- end -->)", re.S)


def diagram() -> str:
    """All transitions, as a picture and as a table."""
    arrows = "\n".join(f"    {a.value} --> {b.value}: {trigger.value}" for (a, trigger), b in TRANSITIONS.items())
    rows = "\n".join(f"| `{a.value}` | {trigger.value} | `{b.value}` |" for (a, trigger), b in TRANSITIONS.items())
    picture = f"```mermaid\nstateDiagram-v2\n    [*] --> joining\n{arrows}\n    left --> [*]\n```\n"
    return f"\n{picture}\n| a node that is | when | becomes |\n|---|---|---|\n{rows}\n\n"


def test_the_page_on_the_rendezvous_shows_the_transitions_of_the_code() -> None:
    found = BLOCK.search(PAGE.read_text())
    assert found and found[2] == diagram(), "python -m tests.test_docs writes it anew"


def test_links_lead_somewhere() -> None:
    root = PAGE.parent.parent
    pages = [*root.glob("*.md"), *root.glob("docs/**/*.md"), *root.glob("benchmarks/*.md")]
    links = [(page, link) for page in pages for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()) if "://" not in link]
    assert [f"{page.name}: {link}" for page, link in links if not (page.parent / link).exists()] == []


if __name__ == "__main__":
    PAGE.write_text(BLOCK.sub(lambda found: found[1] + diagram() + found[3], PAGE.read_text()))
