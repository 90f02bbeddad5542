"""The images that the examples train on, without scikit-learn: importing it takes a worker almost as long as importing torch."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

DATASETS = """
from types import SimpleNamespace
import numpy

def load_digits():
    rows = numpy.loadtxt({path!r}, delimiter=",")
    return SimpleNamespace(images=rows[:, :-1].reshape(-1, 8, 8), target=rows[:, -1].astype(int))
"""


def without_sklearn(folder: Path) -> str:
    """Make a folder for PYTHONPATH in which ``sklearn.datasets.load_digits`` reads scikit-learn's file, and nothing else is there."""
    found = find_spec("sklearn")
    assert found and found.origin
    (package := folder / "without-sklearn" / "sklearn").mkdir(parents=True, exist_ok=True)
    (package / "__init__.py").touch()
    (package / "datasets.py").write_text(DATASETS.format(path=str(Path(found.origin).parent / "datasets" / "data" / "digits.csv.gz")))
    return str(package.parent)
