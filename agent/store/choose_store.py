"""Chooses the store where the nodes of a job meet. No other module does. See docs/torchrun.md."""

from __future__ import annotations

from elastirun.agent.store.endpoint_access import EndpointAccess
from elastirun.agent.store.store_access import EtcdAccess, MemoryAccess, StoreAccess
from elastirun.config import LaunchConfig


def store_access(config: LaunchConfig) -> StoreAccess:
    """Choose the store. Raises BadCommand when a package that the client of etcd needs is missing."""
    if config.etcd is not None:
        return EtcdAccess(config, config.etcd)
    if config.endpoint is not None and not config.standalone:
        return EndpointAccess(config, config.endpoint)
    return MemoryAccess(config)
