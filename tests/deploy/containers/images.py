"""The image that the pods run: deploy/docker/Dockerfile on a base image of the same Debian and Python as this machine's.

torch and what else the example imports is not copied: the site-packages of the environment that runs the tests are mounted where a base
image with torch has its own. The build uses no network.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

from tests.deploy.containers.podman import Podman

ROOT = Path(__file__).parents[3]
BASE, IMAGE = "localhost/elastirun-base:test", "localhost/elastirun:test"
SITE = f"/usr/local/lib/python{sys.version_info[0]}.{sys.version_info[1]}/dist-packages"  # where Debian's python looks
PACKAGES = "python3,python3-venv,ca-certificates"


class NoImage(Exception):
    """There is no base image for this machine; the text says why."""


def site_packages() -> Path:
    """Return the folder that has torch."""
    return Path(torch.__file__).parents[1]


def volumes() -> list[str]:
    """Return podman's options that mount torch."""
    return ["--volume", f"{site_packages()}:{SITE}:ro"]


def build(podman: Podman, wheels: Path) -> str:
    """Build the image and return its name. ``wheels``: a folder for what pip needs to build elastirun."""
    if not podman("images", "--quiet", BASE):
        make_base(podman)
    get_setuptools(wheels)
    extras = "etcd,examples,metrics" if (site_packages() / "prometheus_client").exists() else "etcd,examples"
    values = {"BASE_IMAGE": BASE, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "/wheels", "EXTRAS": extras}
    options = [part for key, value in values.items() for part in ("--build-arg", f"{key}={value}")]
    podman(
        "build", "--pull-never", "--isolation", "chroot", "--file", str(ROOT / "deploy/docker/Dockerfile"), *options, *volumes(),
        "--volume", f"{wheels}:/wheels:ro", "--tag", IMAGE, str(ROOT),
    )  # fmt: skip
    return IMAGE


def make_base(podman: Podman) -> None:
    """Import a base image made from the Debian packages of this machine's release, which needs the package mirror for half a minute."""
    release = debian()
    archive = podman.directory / "base.tar"
    command = ["mmdebstrap", "--quiet", "--variant=minbase", f"--include={PACKAGES}", release, str(archive), *mirror()]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=500)
    if done.returncode:
        raise NoImage(f"mmdebstrap cannot make a base image: {done.stderr.strip()[-300:]}")
    try:
        podman("import", str(archive), BASE)
        found = podman("run", "--rm", "--network", "none", BASE, "python3", "-c", "import sys; print(*sys.version_info[:2])")
    except RuntimeError as error:
        raise NoImage(f"podman cannot run a container on this machine: {error}") from error
    finally:
        archive.unlink()
    if found != f"{sys.version_info[0]} {sys.version_info[1]}":
        raise NoImage(f"the python of Debian {release} is {found.replace(' ', '.')}, the torch here is for another one")


def debian() -> str:
    """Return the code name of this machine's Debian."""
    lines = Path("/etc/os-release").read_text().splitlines()
    found = dict(line.split("=", 1) for line in lines if "=" in line)
    if found.get("ID") != "debian" or "VERSION_CODENAME" not in found:
        raise NoImage("this machine is no Debian, whose packages a base image is made of")
    return found["VERSION_CODENAME"]


def mirror() -> list[str]:
    """Return the mirror that this machine is set up with, empty for mmdebstrap's default."""
    for source in sorted(Path("/etc/apt/sources.list.d").glob("*.sources")):
        for line in source.read_text().splitlines():
            if line.startswith("URIs:"):
                return [line.split()[1]]
    return []


def get_setuptools(folder: Path) -> None:
    """Download what builds elastirun."""
    folder.mkdir(exist_ok=True)
    if not list(folder.glob("setuptools-*.whl")):
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), "setuptools>=77"]
        done = subprocess.run(command, env=os.environ, capture_output=True, text=True, timeout=300)
        if done.returncode:
            raise NoImage(f"pip cannot download setuptools: {done.stderr.strip()[-300:]}")
