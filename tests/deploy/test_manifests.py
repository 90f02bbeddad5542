"""The manifests of deploy/kubernetes: what Kubernetes checks when they are applied, in every version that is supported."""

from __future__ import annotations

import kubernetes_validate
import pytest

from tests.deploy import manifests
from tests.deploy.manifests import OVERLAYS, needs_kubectl

VERSIONS = ("1.33", "1.34", "1.35", "1.36", "1.37")


@needs_kubectl
@pytest.mark.parametrize("name", OVERLAYS)
def test_each_overlay_is_valid_in_every_version_of_kubernetes(name: str) -> None:
    for document in manifests.overlay(name):
        for version in VERSIONS:
            kubernetes_validate.validate(document, version, strict=True)
