"""The documentation as a site: its pages, and the API reference that comes from the docstrings."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.until import PATIENCE

ROOT = Path(__file__).parent.parent
SITE = ROOT / "docs" / "site"
EXAMPLE = """Wraps a module.

    model = wrap(module)

    model(batch)

module        what is wrapped, with
              its ``parameters``
first, second_of_them
              accepted

Raises TrainError  twice."""


def loaded(name: str) -> ModuleType:
    """Return a module of docs/site, which is no package."""
    spec = importlib.util.spec_from_file_location(name, SITE / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def built(folder: Path) -> subprocess.CompletedProcess[str]:
    """Build the site in ``folder`` as ``make docs`` does."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(folder / "mkdocs.yml"), "-d", str(folder / "site")]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONWARNINGS": "ignore"}
    return subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=PATIENCE)


def test_each_public_name_of_the_training_core_is_on_one_page_of_the_reference() -> None:
    pages = loaded("pages")
    shown = [name.rpartition(".")[2] for _, _, names in pages.API.values() for name in names]
    assert len(set(shown)) == len(shown) and pages.public_names() - set(shown) == set()


def test_each_page_has_a_place_in_the_order_and_links_to_source_text_lead_to_pages() -> None:
    pages = loaded("pages")
    found = pages.pages()
    sections = [entry for part in pages.navigation() for entry in part.values()]
    ordered = {
        path for section in sections for path in ([section] if isinstance(section, str) else [p for e in section for p in e.values()])
    }
    sources = {path for path in found if Path(path.removesuffix(".md")).suffix or not (ROOT / path).exists() and "/api/" not in path}
    assert set(found) - sources == ordered
    assert "rendezvous/machine.py.md" in sources and "](../rendezvous/machine.py.md)" in found["docs/rendezvous.md"]
    assert (ROOT / "rendezvous/machine.py").read_text() in found["rendezvous/machine.py.md"]


def test_a_docstring_becomes_examples_and_a_list_of_arguments() -> None:
    pytest.importorskip("griffe")
    assert loaded("docstrings").as_markdown(EXAMPLE) == (
        "Wraps a module.\n\n```python\nmodel = wrap(module)\n\nmodel(batch)\n```\n\n"
        '<dl class="arguments" markdown>\n<dt>module</dt>\n<dd markdown>what is wrapped, with its ``parameters``</dd>\n'
        "<dt>first, second_of_them</dt>\n<dd markdown>accepted</dd>\n</dl>\n\nRaises TrainError  twice."
    )


@pytest.mark.daily(3)
def test_the_site_has_signatures_docstrings_and_sources_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    loaded("pages").write(tmp_path)
    ended = built(tmp_path)
    assert ended.returncode == 0, ended.stdout
    page = (tmp_path / "site" / "docs" / "api" / "data.html").read_text()
    words = " ".join(re.sub(r"<[^>]+>", "", page).split())
    assert "<dt>global_batch_size</dt>" in page and "ElasticDataLoader( dataset: Dataset[Any]," in words
    assert (
        "Source code in elastirun/train/data/loader.py" in words
        and "ElasticDataLoader" in (tmp_path / "site/search/search_index.json").read_text()
    )
    pages = {path: path.read_text() for path in (tmp_path / "site").rglob("*.html")}
    loads = r"<(?:script|img|iframe)[^>]* src=\"?https?:[^>]*|<link[^>]* href=\"?https?:[^>]*"
    assert [f"{path.name}: {found}" for path, text in pages.items() for found in re.findall(loads, text)] == []


def test_a_dead_link_a_dead_anchor_and_a_lost_picture_end_the_build(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    (tmp_path / "pages").mkdir()
    (tmp_path / "pages" / "README.md").write_text("# One\n\n[a](gone.md), [b](#two), [c](gone), ![d](gone.svg), [e](#one)\n")
    (tmp_path / "mkdocs.yml").write_text(loaded("pages").configuration())
    ended = built(tmp_path)
    assert ended.returncode == 1 and "Aborted with 4 warnings in strict mode!" in ended.stdout, ended.stdout
