"""``python -m elastirun.checkpoint``: what it prints, its exit statuses, and the files that it exports."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from elastirun.checkpoint.__main__ import main
from elastirun.checkpoint.directory import open_directory
from elastirun.checkpoint.tensors import NAMES, Box, Chunk, SavedTensor, assemble, decode_tensors
from elastirun.errors import CheckpointError
from tests.checkpoint.saves import FENCE, commit_of, yes
from tests.support.until import PATIENCE

ROOT = Path(__file__).resolve().parents[2]
WEIGHT, BIAS = struct.pack("6f", *range(6)), struct.pack("2q", -1, 7)


def whole(dtype: str, *shape: int, at: int, nbytes: int) -> dict[str, Any]:
    """A tensor in one chunk."""
    chunk = {"offsets": [0] * len(shape), "sizes": shape, "file": "__0_0.distcp", "at": at, "nbytes": nbytes}
    return {"dtype": dtype, "shape": shape, "chunks": [chunk]}


TENSORS: dict[str, Any] = {
    "model.weight": {
        "dtype": "float32",
        "shape": [2, 3],
        "chunks": [  # two shards by columns
            {"offsets": [0, 0], "sizes": [2, 1], "file": "__0_0.distcp", "at": 64, "nbytes": 8},
            {"offsets": [0, 1], "sizes": [2, 2], "file": "__1_0.distcp", "at": 64, "nbytes": 16},
        ],
    },
    "model.bias": whole("int64", 2, at=72, nbytes=16),
    "model.scale": whole("bool", at=88, nbytes=1),
    "model.none": {"dtype": "float16", "shape": [0, 3], "chunks": []},
    "seed@0": whole("uint8", 1, at=88, nbytes=1),
}
TENSORS["tied"] = TENSORS["model.bias"]
TENSOR = {"$": "tensor"}
VALUES = {
    "model": {"$": "module", "versions": {}, "items": {"weight": TENSOR, "bias": {"$": "array"}, "scale": TENSOR, "none": TENSOR}},
    "tied": TENSOR,
    "epoch": 3,
    "lrs": [0.5, {"$": "float", "value": "inf"}],
    "seed": {"$": "per_rank"},
    "pair": {"$": "tuple", "items": [1, "x"]},
    "by number": {"$": "dict", "type": "dict", "items": [[7, {"a": None}]]},
}
FILES = {
    "__0_0.distcp": b"\0" * 64 + WEIGHT[0:4] + WEIGHT[12:16] + BIAS + b"\1",
    "__1_0.distcp": b"\0" * 64 + WEIGHT[4:12] + WEIGHT[16:24],
    "tensors.json": json.dumps(TENSORS).encode(),
    "values.json": json.dumps(VALUES).encode(),
}


def publish(url: str, *steps: int, files: dict[str, bytes] = FILES) -> None:
    directory = open_directory(url)
    claim = directory.claim(FENCE.format(1), yes)
    for sequence, step in enumerate(steps, claim.sequence):
        sums = {name: directory.backend.write(claim.name, step, name, memoryview(data)) for name, data in files.items()}
        directory.publish(claim.name, commit_of(step, sequence, sums, round=1), yes)


def run(*arguments: str | Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as end:
        main([str(argument) for argument in arguments])
    output = capsys.readouterr()
    assert isinstance(end.value.code, int)
    return end.value.code, output.out, output.err


def test_checkpoints_are_listed_newest_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    publish(str(tmp_path), 100, 200, 150)
    os.truncate(tmp_path / "step-00000100" / "__0_0.distcp", 5)
    (tmp_path / "step-00000300").mkdir()
    code, output, errors = run("ls", tmp_path, capsys=capsys)
    rows = [line.split() for line in output.splitlines()]
    assert (code, errors) == (0, "")
    assert [row[:3] for row in rows[1:]] == [
        ["step-00000150", "150", "3"],
        ["step-00000200", "200", "2"],
        ["step-00000100", "100", "1"],
        ["step-00000300", "-", "-"],
    ]
    assert [line.rpartition("  ")[2] for line in output.splitlines()] == [
        "STATE",
        "complete",
        "complete",
        "__0_0.distcp: has 5 bytes instead of 89",
        "commit.json: is missing",
    ]
    assert rows[1][3:] == [rows[1][3], "d", "1.4", "kB", "4", "1", "complete"]


def test_verify_reads_every_byte(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    publish(str(tmp_path), 1, 2)
    assert run("verify", tmp_path, capsys=capsys) == (0, "step-00000002: whole\nstep-00000001: whole\n", "")
    (tmp_path / "step-00000001" / "__1_0.distcp").write_bytes(b"x" * len(FILES["__1_0.distcp"]))
    (tmp_path / "step-00000001" / "values.json").unlink()
    damage = "step-00000001: __1_0.distcp: its checksum is wrong: bytes have changed\nstep-00000001: values.json: is missing\n"
    assert run("verify", tmp_path, capsys=capsys) == (1, f"step-00000002: whole\n{damage}", "")
    assert run("verify", tmp_path, "--step=2", capsys=capsys) == (0, "step-00000002: whole\n", "")
    assert run("verify", tmp_path / "step-00000001", capsys=capsys) == (1, damage, "")


@pytest.mark.parametrize("where", ["", "/step-00000100", "/step-00000100/"])
def test_the_content_of_a_checkpoint_is_shown(tmp_path: Path, where: str, capsys: pytest.CaptureFixture[str]) -> None:
    publish(str(tmp_path), 100)
    code, output, errors = run("show", f"{tmp_path}{where}", capsys=capsys)
    assert (code, errors) == (0, "")
    lines = output.splitlines()
    assert lines[0].startswith("step-00000100: step 100, sequence 1, 2017-07-1")
    assert lines[1] == "published by round 1 (store:1), world size 1"
    assert lines[2].startswith("file    __0_0.distcp  89 B  sha256 ")
    assert [line for line in lines if line.startswith("tensor")][:2] == [
        "tensor  model.weight  float32 [2, 3]  24 B  __0_0.distcp, __1_0.distcp",
        "tensor  model.bias  int64 [2]  16 B  __0_0.distcp",
    ]
    assert [line for line in lines if line.startswith("value")] == [
        "value   epoch = 3",
        "value   lrs.0 = 0.5",
        'value   lrs.1 = float "inf"',
        "value   seed = per_rank null",
        'value   pair = tuple [1, "x"]',
        "value   by number.7.a = null",
    ]


def test_an_object_store_is_shown_as_a_folder_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    publish(f"memory://{tmp_path}", 5)
    code, output, _ = run("verify", f"memory://{tmp_path}", capsys=capsys)
    assert code == 0 and output.startswith("step-00000005.store-1-")
    name = output.partition(":")[0]
    assert run("show", f"memory://{tmp_path}/{name}", capsys=capsys)[0] == 0


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ([], "Missing command."),
        (["dance"], "No such command 'dance'."),
        (["ls"], "Missing argument 'DIR'."),
        (["ls", "{}/empty"], "{}/empty has no checkpoints"),
        (["ls", "{}/none"], "{}/none does not exist"),
        (["ls", "nothing://x"], "nothing://x cannot be used as a directory of checkpoints: Protocol not known: nothing"),
        (["verify", "{}"], "{} has no checkpoint of step 7; it has those of 3"),
        (["verify", "{}/empty"], "{}/empty has no checkpoints"),
        (["show", "{}", "--step=-1"], "Invalid value for '--step': -1 is not in the range x>=0."),
        (["show", "{}", "--step=7"], "{} has no checkpoint of step 7; it has those of 3"),
        (["show", "{}/dcp"], "{}/dcp/step-00000001/tensors.json is no part of this checkpoint: another program has written it"),
        (["show", "{}/hurt"], "{}/hurt/step-00000001 is damaged: tensors.json: has 3 bytes instead of {size}"),
        (["show", "{}/odd"], "{}/odd/step-00000001/tensors.json: its entry of the tensor a is wrong: 'dtype'"),
        (["export", "{}"], "Missing option '--to'."),
        (["export", "{}", "--to", "{}/file"], "{}/file exists already: choose another name"),
        (["export", "{}", "--to", "{}/no/file.pt"], "{}/no/file.pt cannot be made: there is no folder {}/no"),
        (["export", "{}", "--to", "/proc/file.pt"], "/proc/file.pt."),
        (["export", "{}", "--to", "{}/x.onnx"], "{}/x.onnx: the form .onnx is not known; the name may end in .safetensors "),
        (["export", "{}/hurt", "--to", "{}/new"], "{}/hurt/step-00000001 is damaged, and is not exported: tensors.json: has 3 bytes"),
    ],
)
def test_bad_input_ends_in_one_line(tmp_path: Path, arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    publish(str(tmp_path), 3)
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    publish(str(tmp_path / "dcp"), 1, files={"x": b""})
    publish(str(tmp_path / "odd"), 1, files={"tensors.json": b'{"a":{}}', "values.json": b"{}"})
    publish(str(tmp_path / "hurt"), 1)
    os.truncate(tmp_path / "hurt" / "step-00000001" / "tensors.json", 3)
    before = sorted(tmp_path.rglob("*"))
    if arguments[:2] == ["verify", "{}"]:
        arguments = [*arguments, "--step=7"]
        line = "{} has no checkpoint of step 7"
    code, output, errors = run(*(argument.replace("{}", str(tmp_path)) for argument in arguments), capsys=capsys)
    expected = line.replace("{}", str(tmp_path)).replace("{size}", str(len(FILES["tensors.json"])))
    assert (
        (code, output) == (4 if " has no checkpoint" in line else 2, "")
        and errors.startswith(f"elastirun checkpoint: {expected}")
        and errors.count("\n") == 1
    )
    assert sorted(tmp_path.rglob("*")) == before


def test_the_command_starts_without_torch(tmp_path: Path) -> None:
    publish(str(tmp_path), 1)
    code = "import sys; sys.argv[0] = 'x'\nfrom elastirun.checkpoint.__main__ import main\n"
    code += "try: main()\nexcept SystemExit: sys.exit('torch' in sys.modules or 'fsspec' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, "show", str(tmp_path)], cwd=ROOT, stdout=subprocess.DEVNULL, timeout=PATIENCE)
    assert done.returncode == 0


# -- export --------------------------------------------------------------------------------------------------------------------


def test_a_state_is_exported_for_torch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch = pytest.importorskip("torch")
    publish(str(tmp_path / "d"), 1)
    code, output, errors = run("export", tmp_path / "d", "--to", tmp_path / "x.pt", capsys=capsys)
    size = (tmp_path / "x.pt").stat().st_size
    assert (code, errors) == (0, "")
    assert output == f"{tmp_path}/x.pt: step-00000001, 6 tensors, {size} bytes; 1 values that each rank has its own of are None\n"
    state = torch.load(tmp_path / "x.pt", weights_only=True)
    model = state.pop("model")
    assert torch.equal(model["weight"], torch.arange(6.0).reshape(2, 3)) and model["bias"].tolist() == [-1, 7]
    assert model["scale"].item() is True and model["none"].shape == (0, 3) and model["none"].dtype == torch.float16
    assert state.pop("tied").data_ptr() == model["bias"].data_ptr()
    assert state == {"epoch": 3, "lrs": [0.5, float("inf")], "seed": None, "pair": (1, "x"), "by number": {7: {"a": None}}}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d", "x.pt"]


def test_tensors_are_exported_as_safetensors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    publish(str(tmp_path / "d"), 1)
    code, output, _ = run("export", tmp_path / "d", "--to", tmp_path / "x.safetensors", capsys=capsys)
    data = (tmp_path / "x.safetensors").read_bytes()
    assert code == 0 and output.endswith("; other values are left out\n")
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    assert length % 8 == 0 and header.pop("__metadata__") == {"format": "pt", "step": "1"}
    found: dict[str, Any] = {}
    end = 0
    for name, entry in header.items():
        assert entry["data_offsets"][0] == end
        end = entry["data_offsets"][1]
        found[name] = (entry["dtype"], entry["shape"], data[8 + length :][slice(*entry["data_offsets"])])
    assert end == len(data) - 8 - length
    assert found["model.weight"] == ("F32", [2, 3], WEIGHT) and found["model.bias"] == found["tied"] == ("I64", [2], BIAS)
    assert found["model.none"] == ("F16", [0, 3], b"")


def test_safetensors_reads_the_export(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    publish(str(tmp_path / "d"), 1)
    run("export", tmp_path / "d", "--to", tmp_path / "x.safetensors", capsys=capsys)
    found = safetensors.load_file(tmp_path / "x.safetensors")
    assert found["model.weight"].tolist() == [[0, 1, 2], [3, 4, 5]] and found["model.bias"].tolist() == [-1, 7]


def test_nothing_is_left_of_an_export_that_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    odd = {"a": {"dtype": "quint8", "shape": [1], "chunks": [{"offsets": [0], "sizes": [1], "file": "f", "at": 0, "nbytes": 1}]}}
    values = json.dumps({"a": TENSOR}).encode()
    publish(str(tmp_path / "d"), 1, files={"f": b"x", "tensors.json": json.dumps(odd).encode(), "values.json": values})
    code, _, errors = run("export", tmp_path / "d", "--to", tmp_path / "x.safetensors", capsys=capsys)
    assert code == 2 and errors == "elastirun checkpoint: the tensor a has the type quint8, which safetensors does not have\n"
    assert [path.name for path in tmp_path.iterdir()] == ["d"]


def test_boxes_of_any_shape_are_put_together() -> None:
    shape, files, chunks = (3, 4, 5), {}, []
    whole = bytes(range(60))
    at = {(i, j, k): whole[20 * i + 5 * j + k] for i in range(3) for j in range(4) for k in range(5)}
    for i, rows in ((0, 1), (1, 2)):
        for j, columns in ((0, 3), (3, 1)):
            for k, depth in ((0, 2), (2, 3)):
                box = [at[a, b, c] for a in range(i, i + rows) for b in range(j, j + columns) for c in range(k, k + depth)]
                files[f"f{len(files)}"] = memoryview(bytes(box))
                chunks.append(Chunk(Box((i, j, k), (rows, columns, depth)), f"f{len(files) - 1}", 0, len(box)))
    assert assemble(SavedTensor("uint8", shape, tuple(chunks)), files.__getitem__) == whole
    short = SavedTensor("uint8", (2,), (Chunk(Box((0,), (2,)), "f", 7, 2),))
    with pytest.raises(CheckpointError, match="f does not hold the 2 bytes at 7"):
        assemble(short, lambda name: memoryview(b"12345678"))


@pytest.mark.parametrize(
    "bad",
    [
        {"dtype": "a b"},
        {"dtype": 1},
        {"shape": [-1]},
        {"shape": [3]},
        {"shape": [1] * 65},
        {"chunks": 7},
        {"chunks": [7]},
        {"chunks": [{"offsets": [1], "sizes": [2], "file": "f", "at": 0, "nbytes": 8}]},
        {"chunks": [{"offsets": [0], "sizes": [2], "file": "../f", "at": 0, "nbytes": 8}]},
        {"chunks": [{"offsets": [0], "sizes": [2], "file": "f", "at": -1, "nbytes": 8}]},
        {"chunks": []},
        {"chunks": [{"offsets": [0], "sizes": [1], "file": "f", "at": 0, "nbytes": 4}] * 2},
    ],
)
def test_a_tensor_that_is_out_of_range_is_refused(bad: dict[str, Any]) -> None:
    good = {"dtype": "float32", "shape": [2], "chunks": [{"offsets": [0], "sizes": [2], "file": "f", "at": 0, "nbytes": 8}]}
    assert decode_tensors(json.dumps({"a": good}).encode(), NAMES)["a"].shape == (2,)
    with pytest.raises(CheckpointError, match="its entry of the tensor a is wrong"):
        decode_tensors(json.dumps({"a": {**good, **bad}}).encode(), NAMES)
