"""Checksums find any damage of a checkpoint's files, and cover them all whatever the number of processes."""

import json
import zlib
from pathlib import Path

import numpy as np
import pytest

from megajax.checkpoint import checksums
from megajax.errors import InputError

FILES = {"state/d/large": 1000, "state/d/exact": 256, "state/small": 3, "description/metadata": 40, "empty": 0}
FILES |= {"state/manifest.json": 30, "_METADATA": 9, "state/checksums": 5}


@pytest.fixture
def checkpoint(tmp_path, monkeypatch):
    """A directory with files of FILES' sizes, checksums in pieces of 128 bytes by three processes."""
    monkeypatch.setattr(checksums, "PIECE", 128)
    monkeypatch.setattr(checksums, "BLOCK", 50)
    random = np.random.default_rng(1)
    for name, size in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(random.bytes(size))
    checksums.write(tmp_path, [checksums.compute(tmp_path, index, 3) for index in range(3)])
    return tmp_path


def test_the_record_has_each_file_and_the_crc_of_each_piece(checkpoint):
    record = json.loads((checkpoint / "checksums.json").read_text())
    assert {name: entry["size"] for name, entry in record["files"].items()} == FILES
    for name, entry in record["files"].items():
        data = (checkpoint / name).read_bytes()
        pieces = [data[start : start + 128] for start in range(0, len(data), 128)] or [b""]
        assert entry["crc32"] == [f"{zlib.crc32(piece):08x}" for piece in pieces]
    assert checksums.damage(checkpoint) == ""


def test_a_flipped_bit_anywhere_is_found_by_one_of_the_processes(checkpoint):
    random = np.random.default_rng(2)
    for name, size in FILES.items():
        whole = (checkpoint / name).read_bytes()
        for position in {0, size - 1, *random.integers(size, size=5)} if size else ():
            flipped = bytearray(whole)
            flipped[position] ^= 1 << random.integers(8)
            (checkpoint / name).write_bytes(flipped)
            found = {checksums.damage(checkpoint, index, 3) for index in range(3)}
            assert found == {"", f"{name} has other bits than when it was saved"}, position
        (checkpoint / name).write_bytes(whole)
    assert checksums.damage(checkpoint) == ""


@pytest.mark.parametrize("name", FILES)
def test_truncated_longer_and_missing_files_are_named(checkpoint, name):
    path, size = checkpoint / name, FILES[name]
    whole = path.read_bytes()
    for length in {size - 1, size // 2, 0} - {size, -1}:
        path.write_bytes(whole[:length])
        assert checksums.damage(checkpoint) == f"{name} has {length} bytes instead of {size}"
    path.write_bytes(whole + b"\0")
    assert checksums.damage(checkpoint) == f"{name} has {size + 1} bytes instead of {size}"
    path.unlink()
    assert checksums.damage(checkpoint) == f"{name} is missing"
    assert checksums.damage(checkpoint, part="sta") == (f"{name} is missing" if name.startswith("sta") else "")


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text[:-20],
        lambda text: "[]",
        lambda text: "[" * 100_000,
        lambda text: text.replace('"size": 1000', '"size": 1001'),
    ],
)
def test_a_damaged_record_is_damage(checkpoint, change):
    record = checkpoint / "checksums.json"
    record.write_text(change(record.read_text()))
    assert checksums.damage(checkpoint).startswith("checksums.json cannot be read")


@pytest.mark.parametrize(
    ("name", "size"),
    [("../outside", 3), ("/etc/hostname", 3), ("state/\0", 3), ("x", float("inf")), ("x", "many"), ("x", 129)],
)
def test_a_forged_record_leads_to_no_other_file(checkpoint, name, size):
    record = json.loads((checkpoint / "checksums.json").read_text())
    record["files"][name] = {"size": size, "crc32": ["00000000"]}
    record["crc32"] = f"{zlib.crc32(json.dumps(record['files'], sort_keys=True).encode()):08x}"
    (checkpoint / "checksums.json").write_text(json.dumps(record))
    assert checksums.damage(checkpoint).startswith("checksums.json cannot be read")


def test_the_loss_of_written_checksums_is_damage_with_a_way_out(checkpoint):
    (checkpoint / "checksums.json").unlink()
    for part in ("", "description"):
        found = checksums.damage(checkpoint, part=part)
        assert found.startswith("checksums.json is missing: ") and "remove checksums.json.written" in found
    (checkpoint / "checksums.json.written").unlink()  # as in an older version, or after a crash
    assert checksums.damage(checkpoint) == checksums.lost(checkpoint) == ""


def test_processes_that_see_other_files_write_no_record(checkpoint):
    for record in checkpoint.glob("checksums.json*"):
        record.unlink()
    shares = [checksums.compute(checkpoint, index, 2) for index in range(2)]
    assert "see different files" in checksums.write(checkpoint, [shares[0], shares[1][1:]])
    assert not checksums.exist(checkpoint) and checksums.damage(checkpoint) == ""


@pytest.mark.parametrize("name", ["checksums.json", "state/small"])
def test_a_file_that_may_not_be_read_is_a_mistake_and_no_damage(checkpoint, monkeypatch, name):
    opened = Path.open

    def forbid(self, *arguments, **more):
        if self == checkpoint / name:
            raise PermissionError(13, "Permission denied")
        return opened(self, *arguments, **more)

    monkeypatch.setattr(Path, "open", forbid)
    with pytest.raises(InputError, match=f"{name} cannot be read: give yourself the permission"):
        checksums.damage(checkpoint)
