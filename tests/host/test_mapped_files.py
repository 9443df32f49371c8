"""Mapped weights are read from their files: the bytes are those of the mapping, whatever has become of the file."""

import errno
import mmap
import os
import signal
import threading
import time

import pytest
import torch

from kog_triton.backends import mapped_files
from kog_triton.backends.mapped_files import MappedFiles
from kog_triton.checkpoint.shards import ShardWriter
from kog_triton.checkpoint.tensor_files import TensorFiles
from kog_triton.errors import ModelError

SIZE = 5 * 4096 + 123


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    monkeypatch.setattr(mapped_files, "LEAST_BYTES", 1000)


@pytest.fixture
def files():
    opened = set(os.listdir("/proc/self/fd"))
    files = MappedFiles(3)
    yield files
    files.close()
    assert not reading()
    assert set(os.listdir("/proc/self/fd")) <= opened


def reading():
    return [t for t in threading.enumerate() if t.name.startswith("kog-read")]


def write(path, size=SIZE, seed=1):
    data = torch.randint(0, 256, (size,), generator=torch.Generator().manual_seed(seed)).to(torch.uint8)
    path.write_bytes(data.numpy().tobytes())
    return data


def map_file(path):
    return torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)


def copy(files, source):
    to = torch.full((len(source) + 2,), 7, dtype=torch.uint8)
    files.copy(source, to[1:-1])
    assert to[0] == to[-1] == 7  # nothing beside it
    return to[1:-1]


@pytest.mark.parametrize("first", [0, 1, 4095, 4096, 9001])
@pytest.mark.parametrize("count", [1, 999, 1001, 4096, 8191, SIZE - 9001])
def test_bytes_from_anywhere_in_a_file(tmp_path, files, first, count):
    data = write(tmp_path / "weights")
    found = copy(files, map_file(tmp_path / "weights")[first : first + count])
    assert torch.equal(found, data[first : first + count])
    assert files.bytes_read == count


@pytest.mark.parametrize("threads", [1, 2, 8])
def test_several_files_by_turns(tmp_path, threads):
    data = [write(tmp_path / str(i), SIZE + i, i) for i in range(3)]
    maps = [map_file(tmp_path / str(i)) for i in range(3)]
    files = MappedFiles(threads)
    for first in (0, 5000, 17):
        for values, mapped in zip(data, maps, strict=True):
            assert torch.equal(copy(files, mapped[first:]), values[first:])
    assert files.bytes_read == sum(3 * len(v) - 5017 for v in data)
    files.close()
    assert not reading()


def test_the_tensors_of_a_checkpoint_in_shards(tmp_path, files):
    tensors = {f"t{i}": torch.randn(7, 300 + i).bfloat16() for i in range(6)}
    shards = ShardWriter(tmp_path, shard_bytes=9000)
    for name, tensor in tensors.items():
        shards.add(name, tensor)
    shards.close()
    stored = TensorFiles(tmp_path)
    assert len({s.file for s in stored.stored.values()}) > 2
    for name, tensor in tensors.items():
        expected = tensor.view(-1).view(torch.uint8)
        assert torch.equal(copy(files, stored.read(name).view(-1).view(torch.uint8)), expected)
    assert files.bytes_read == sum(t.nbytes for t in tensors.values())


def test_a_mapping_of_a_file_s_middle(tmp_path, files):
    data = write(tmp_path / "weights")
    with (tmp_path / "weights").open("rb") as file:
        middle = mmap.mmap(file.fileno(), 8000, access=mmap.ACCESS_COPY, offset=8192)
    found = copy(files, torch.frombuffer(middle, dtype=torch.uint8)[3:])
    assert torch.equal(found, data[8195:16192]) and files.bytes_read == 7997


def test_memory_that_is_no_file(files):
    data = torch.arange(5000).to(torch.uint8)
    assert torch.equal(copy(files, data), data)
    assert files.bytes_read == 0


@pytest.mark.parametrize("end", ["replaced", "deleted", "deleted beside a file named as Linux tells of it"])
def test_a_file_that_is_gone_is_what_its_mapping_shows(tmp_path, files, end):
    data, path = write(tmp_path / "weights"), tmp_path / "weights"
    mapped = map_file(path)
    if end == "replaced":
        write(tmp_path / "other", seed=2)
        (tmp_path / "other").rename(path)
    else:
        path.unlink()
        if end != "deleted":
            write(tmp_path / "weights (deleted)", seed=2)
    assert torch.equal(copy(files, mapped), data)


@pytest.mark.parametrize("at", [0, 4096, 9000, SIZE - 1])
def test_pages_that_were_written_to_keep_what_was_written(tmp_path, files, at):
    data = write(tmp_path / "weights")
    mapped = map_file(tmp_path / "weights")
    assert torch.equal(copy(files, mapped), data) and files.bytes_read == SIZE
    mapped[at] += 1
    found = copy(files, mapped)
    assert found[at] == (int(data[at]) + 1) % 256 and (found != data).sum() == 1
    before = files.bytes_read
    copy(files, mapped[3 * 4096 : 4 * 4096])  # a page beside it is the file's still
    assert files.bytes_read == before + 4096


@pytest.mark.parametrize("size", [0, 4096, SIZE - 1])
def test_a_file_that_shrank_is_one_line(tmp_path, files, size):
    write(tmp_path / "weights")
    mapped = map_file(tmp_path / "weights")
    os.truncate(tmp_path / "weights", size)
    with pytest.raises(ModelError, match=rf"weights: ends at byte {size}, .*: load the model again$"):
        copy(files, mapped)


def test_a_damaged_place_is_one_line(tmp_path, files, monkeypatch):
    write(tmp_path / "weights")
    read = os.preadv

    def damaged(fd, buffers, at):
        if at > 9000:
            raise OSError(errno.EIO, "Input/output error")
        return read(fd, buffers, at)

    monkeypatch.setattr(os, "preadv", damaged)
    with pytest.raises(ModelError, match=r"weights: cannot be read at byte \d+: .*Input/output error$"):
        copy(files, map_file(tmp_path / "weights"))


def test_short_reads_go_on(tmp_path, files, monkeypatch):
    data, read = write(tmp_path / "weights"), os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, to, at: read(fd, [to[0][:77]], at))
    assert torch.equal(copy(files, map_file(tmp_path / "weights")), data)


@pytest.mark.parametrize("parts", [2, 3])
def test_an_interrupt_waits_until_a_copy_is_whole(tmp_path, files, monkeypatch, parts):
    """Wherever it came, a lock of the threads' might have stayed held."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # what runs in the background ignores it
    data, read = write(tmp_path / "weights"), os.preadv
    to = torch.empty_like(data)

    def interrupt(fd, buffers, at):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.05)  # for the main thread to see it
        return read(fd, buffers, at)

    monkeypatch.setattr(os, "preadv", interrupt)
    monkeypatch.setattr(mapped_files, "LEAST_BYTES", SIZE // parts)
    try:
        with pytest.raises(KeyboardInterrupt):
            files.copy(map_file(tmp_path / "weights"), to)
    finally:
        signal.signal(signal.SIGINT, before)
    assert torch.equal(to, data)


@pytest.mark.parametrize("hidden", ["MAPS", "PAGEMAP"])
def test_where_linux_does_not_say_memory_is_copied(tmp_path, files, monkeypatch, hidden):
    monkeypatch.setattr(mapped_files, hidden, tmp_path / "none")
    data = write(tmp_path / "weights")
    assert torch.equal(copy(files, map_file(tmp_path / "weights")), data)
    assert files.bytes_read == 0
