"""Loading of etcd's messages with the installed protobuf, and no import of either where etcd is not used."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from elastirun.errors import StartError
from elastirun.rendezvous.stores.etcd import messages
from elastirun.rendezvous.stores.etcd.messages import FILES, check_installed, load
from tests.support.until import PATIENCE

ROOT = Path(__file__).resolve().parents[2]


def python(code: str, *path: Path, **environment: str) -> str:
    """Return the output of a fresh interpreter with ``path`` first on its module path."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (*path, ROOT))), **environment}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_elastirun_comes_up_without_grpc_and_protobuf_and_the_etcd_store_too_until_it_is_used() -> None:
    code = "import sys, elastirun.cli.main, elastirun.agent.agent, elastirun.rendezvous.stores.etcd.store as etcd\n"
    code += "etcd.connector(['127.0.0.1:1'])\n"
    code += "print([name for name in ('grpc', 'google.protobuf', 'etcd3', 'tenacity', 'torch') if name in sys.modules])"
    assert python(code) == "[]\n"


def test_a_message_goes_to_bytes_and_back() -> None:
    messages = load()
    request = messages.TxnRequest(
        compare=[messages.Compare(key=b"k", target=messages.Compare.MOD, result=messages.Compare.EQUAL, mod_revision=7)],
        success=[messages.RequestOp(request_put=messages.PutRequest(key=b"k", value=b"v", lease=-1))],
    )
    assert messages.TxnRequest.FromString(request.SerializeToString()) == request
    assert request.SerializeToString().hex() == "0a0710021a016b3007" + "1213" + "12110a016b12017618" + "ff" * 9 + "01"
    with pytest.raises(AttributeError, match="etcd has no message Nothing"):
        _ = messages.Nothing


CLASH = """
import importlib, sys
for name in {order}:
    if name == "etcd":
        from elastirun.rendezvous.stores.etcd.messages import load
        load().RangeRequest(key=b"k")
    elif name == "clash":
        from google.protobuf import descriptor_pb2, descriptor_pool
        for file in ("kv.proto", "auth.proto", "rpc.proto"):
            other = descriptor_pb2.FileDescriptorProto(name=file, package="etcdserverpb")
            other.message_type.add(name="RangeRequest" if file == "rpc.proto" else "Other" + file[0])
            descriptor_pool.Default().AddSerializedFile(other.SerializeToString())
    else:
        importlib.import_module(name)
print(load().RangeRequest(key=b"k").key)
"""


@pytest.mark.parametrize("order", [("etcd", "clash", "torch"), ("clash", "torch", "etcd")])
def test_another_protocol_of_the_same_name_in_the_process_is_in_nobodys_way(order: tuple[str, ...]) -> None:
    assert python(CLASH.format(order=order)) == "b'k'\n"


def test_a_failed_connection_prints_nothing_and_leaves_the_environment_as_it_was() -> None:
    code = "import os\nbefore = dict(os.environ)\n"
    code += "from elastirun.rendezvous.stores.etcd.messages import load\ng = load().grpc\nassert dict(os.environ) == before\n"
    code += "channel = g.secure_channel('127.0.0.1:1', g.ssl_channel_credentials(b'no certificate'))\n"
    code += "try:\n    channel.unary_unary('/a/b')(b'', timeout=5)\nexcept g.RpcError as error:\n    print(error.code().name)"
    assert python(code) == "UNAVAILABLE\n"
    assert "Could not load any root certificate" in python(code, GRPC_VERBOSITY="ERROR"), "who asks for it sees it"


@pytest.mark.parametrize("missing", ["etcd3", "grpcio", "protobuf"])
def test_a_missing_package_is_named_with_what_to_do(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = {"grpcio": "grpc", "protobuf": "google.protobuf"}.get(missing, missing)
    find = messages.importlib.util.find_spec
    monkeypatch.setattr(messages.importlib.util, "find_spec", lambda name: None if name == module else find(name))
    with pytest.raises(StartError, match=rf"needs the package {missing}, .*: pip install 'etcd3==.*' grpcio protobuf"):
        check_installed()


def test_another_package_called_etcd3_is_told_apart(tmp_path: Path) -> None:
    (tmp_path / "etcd3.py").touch()
    code = "from elastirun.rendezvous.stores.etcd import messages\ntry:\n    messages.check_installed()\n"
    code += "except messages.BadCommand as error:\n    print(error)"
    assert f"{tmp_path} is not the package etcd3 >= 0.12" in python(code, tmp_path)


def newer(line: str) -> str:
    """Return the line as protoc writes it today."""
    return f"DESCRIPTOR = _descriptor_pool.Default().AddSerializedFile({line})\n"


@pytest.mark.parametrize("style", ["today", "unknown"])
def test_a_later_release_of_etcd3_is_read_as_well_or_refused_in_words(style: str, tmp_path: Path) -> None:
    folder = tmp_path / "etcd3" / "etcdrpc"
    folder.mkdir(parents=True)
    (tmp_path / "etcd3" / "__init__.py").touch()
    for name in FILES:
        description = messages._description(messages._folder() / name)
        (folder / name).write_text(newer(repr(description)) if style == "today" else "import everything_new\n")
    code = "from elastirun.rendezvous.stores.etcd import messages\ntry:\n    print(messages.load().RangeRequest(key=b'k').key)\n"
    code += "except messages.BadCommand as error:\n    print(error)"
    expected = {"today": "b'k'", "unknown": "kv_pb2.py has no description of etcd's protocol that elastirun can read"}
    assert expected[style] in python(code, tmp_path)
