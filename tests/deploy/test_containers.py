"""Jobs of Kubernetes in real containers: the short form of ``python -m tests.deploy.containers``."""

from __future__ import annotations

import faulthandler
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deploy.containers import images, scenarios
from tests.deploy.containers.jobs import Cluster, cluster
from tests.deploy.containers.podman import Podman, podman, why_not
from tests.deploy.manifests import needs_kubectl

WHY_NOT = why_not()
pytestmark = [pytest.mark.daily(3, "pods"), needs_kubectl, pytest.mark.skipif(bool(WHY_NOT), reason=f"no containers here: {WHY_NOT}")]


@pytest.fixture(autouse=True)
def no_time_limit() -> None:
    """Take pytest's limit for a test off: on a busy machine the image alone may take longer, and each wait here has a limit of its own."""
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture(scope="module")
def engine() -> Iterator[Podman]:
    faulthandler.cancel_dump_traceback_later()  # begins before the fixture above
    # Not in pytest's folder: what is still mounted there after a kill would break the next run of any tests.
    with podman(Path(tempfile.mkdtemp(prefix="elastirun-pods-"))) as made:
        yield made


@pytest.fixture(scope="module")
def image(engine: Podman, tmp_path_factory: pytest.TempPathFactory) -> str:
    try:
        return images.build(engine, tmp_path_factory.mktemp("wheels"))
    except images.NoImage as reason:
        pytest.skip(str(reason))


@pytest.fixture
def pods(engine: Podman, image: str, tmp_path: Path) -> Iterator[Cluster]:
    with cluster(engine, tmp_path / "cluster", image, images.volumes()) as made:
        yield made


LONG = [pytest.param(name, marks=pytest.mark.long) for name in ("eviction", "scale-command")]


@pytest.mark.parametrize("name", ["plain", "raising-script", *LONG])
def test_a_job_ends_as_the_scenario_promises(pods: Cluster, name: str) -> None:
    job = scenarios.ALL[name](pods)
    assert job.ends().startswith("Failed: PodFailurePolicy" if name == "raising-script" else "Complete"), job.story()
