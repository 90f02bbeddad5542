"""Loads etcd's messages and methods from the files of the package ``etcd3``, with any protobuf from 3.20 on.

etcd3 0.12, the latest release, cannot be imported with protobuf 4 or later ("Descriptors cannot be created directly"), and training
environments need 6 or later. But each of its ``*_pb2.py`` has a line with the serialized description of the protocol. Only that line is
used, and no code of etcd3 runs. The classes are made in a descriptor pool of their own, so they do not conflict with another
``rpc.proto`` in the same process, such as etcd3's own under an older protobuf.

Neither grpc nor protobuf is imported before ``load`` is called.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import re
import threading
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

from elastirun.errors import BadCommand
from elastirun.rendezvous.stores.environment import variable

INSTALL = "pip install 'etcd3==0.12.0' grpcio protobuf"
FILES = ("kv_pb2.py", "auth_pb2.py", "rpc_pb2.py")  # each needs those before it
PACKAGE = "etcdserverpb"
VERBOSITY = "GRPC_VERBOSITY"  # a variable; the user may have chosen a value
_STRING = r"""b?(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")"""
_SERIALIZED = re.compile(rf"(?:serialized_pb=|AddSerializedFile\()(?:_b\()?({_STRING})")  # as protoc up to 3.19 writes it, and later ones

_lock = threading.Lock()  # the store thread may open a connection while an abandoned one still loads in its thread
_loaded: list[Messages] = []


class Messages:
    """etcd's message classes by name, as in ``messages.RangeRequest(key=b"a")``, and its methods. ``grpc`` is the module."""

    def __init__(self, descriptions: Iterable[bytes], grpc: Any) -> None:
        from google.protobuf import descriptor_pb2, descriptor_pool

        self.grpc = grpc
        self._pool = descriptor_pool.DescriptorPool()
        self._methods: dict[str, Any] = {}
        for description in descriptions:
            self._pool.AddSerializedFile(description)
            for service in descriptor_pb2.FileDescriptorProto.FromString(description).service:
                self._methods.update({f"{service.name}/{method.name}": method for method in service.method})

    def __getattr__(self, name: str) -> Any:
        """Return the class of the message ``name``."""
        try:
            made = self._class_of(self._pool.FindMessageTypeByName(f"{PACKAGE}.{name}"))
        except KeyError:
            raise AttributeError(f"etcd has no message {name}") from None
        setattr(self, name, made)
        return made

    @cached_property
    def _class_of(self) -> Any:
        from google.protobuf import message_factory

        since_4_22 = getattr(message_factory, "GetMessageClass", None)
        return since_4_22 or message_factory.MessageFactory(self._pool).GetPrototype

    def method(self, channel: Any, name: str) -> Any:
        """Return the method ``name``, such as ``KV/Range``, over ``channel``. It takes a message, or for a stream an iterator of them."""
        method = self._methods[name]
        request, answer = (getattr(self, kind.rpartition(".")[2]) for kind in (method.input_type, method.output_type))
        kind = channel.stream_stream if method.client_streaming else channel.unary_unary
        return kind(f"/{PACKAGE}.{name}", request_serializer=request.SerializeToString, response_deserializer=answer.FromString)


def check_installed() -> None:
    """Raise ``BadCommand`` when a package that the store needs is missing. Imports none of them."""
    for name, package in (("etcd3", "etcd3"), ("grpc", "grpcio"), ("google.protobuf", "protobuf")):
        try:
            found = importlib.util.find_spec(name)
        except ImportError:  # there is no package ``google`` either
            found = None
        if found is None:
            raise BadCommand(f"the etcd store needs the package {package}, which is not installed here: {INSTALL}")
    _folder()


def load() -> Messages:
    """Return the messages, which are loaded the first time. Raises ``BadCommand`` when a package is missing or cannot be imported."""
    with _lock:
        if not _loaded:
            check_installed()
            descriptions = [_description(_folder() / name) for name in FILES]
            try:
                # gRPC's C++ reads its verbosity once. Otherwise it writes up to four lines to stderr for a failed connection.
                with variable(VERBOSITY, os.environ.get(VERBOSITY, "NONE")):
                    grpc = importlib.import_module("grpc")
                    grpc.insecure_channel("127.0.0.1:1").close()  # reads the verbosity
                _loaded.append(Messages(descriptions, grpc))
            except ImportError as error:
                raise BadCommand(f"the etcd store cannot import what it needs: {error}") from None
        return _loaded[0]


def _folder() -> Path:
    """Return the folder with ``FILES``. Raises ``BadCommand`` when etcd3 is not the package it should be."""
    spec = importlib.util.find_spec("etcd3")
    folder = Path((spec and spec.origin) or "missing").parent / "etcdrpc"
    if not all((folder / name).is_file() for name in FILES):
        raise BadCommand(f"{folder.parent} is not the package etcd3 >= 0.12 (etcd3-py is another one of that name): {INSTALL}")
    return folder


def _description(path: Path) -> bytes:
    """Return the serialized description of a protocol from a module that protoc has written."""
    found = _SERIALIZED.search(path.read_text(encoding="utf-8"))
    if found is None:
        raise BadCommand(f"{path} has no description of etcd's protocol that elastirun can read: pip install 'etcd3==0.12.0'")
    value = ast.literal_eval(found[1])
    return value if isinstance(value, bytes) else value.encode("latin-1")
