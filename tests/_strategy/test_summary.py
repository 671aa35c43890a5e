"""mpidist.summary: the files that TensorBoard reads, and who writes them."""

import struct

import numpy as np
import pytest

import mpidist
from mpidist import summary


def crc_32c(content):
    """Return the CRC-32C, bit by bit."""
    crc = 2**32 - 1
    for byte in content:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ (2**32 - 1)


def unmasked(checksum):
    rotated = (struct.unpack("<I", checksum)[0] - 0xA282EAD8) % 2**32
    return (rotated >> 17 | rotated << 15) % 2**32


def number_at(message, place):
    """Return a varint, and the place after it."""
    number, shift = 0, 0
    while True:
        byte = message[place]
        number, shift, place = number | (byte & 127) << shift, shift + 7, place + 1
        if byte < 128:
            return number, place


def fields(message):
    """Return the fields of a message of a protocol buffer, by number."""
    found, place = {}, 0
    while place < len(message):
        key, place = number_at(message, place)
        if key & 7 == 0:
            found[key >> 3], place = number_at(message, place)
            continue
        size = {1: 8, 5: 4}.get(key & 7)
        if size is None:
            size, place = number_at(message, place)
        found[key >> 3], place = message[place : place + size], place + size
    return found


def read(folder):
    """Return the numbers of the one file in a folder: name, value and step."""
    (path,) = folder.glob("*.tfevents.*")
    text, found = path.read_bytes(), []
    while text:
        (size,) = struct.unpack("<Q", text[:8])
        assert unmasked(text[8:12]) == crc_32c(text[:8])
        content, text = text[12 : 12 + size], text[12 + size :]
        assert unmasked(text[:4]) == crc_32c(content)
        text = text[4:]
        event = fields(content)
        if 3 in event:
            assert event[3] == b"brain.Event:2"
            continue
        value = fields(fields(event[5])[1])
        (number,) = struct.unpack("<f", value[2])
        found.append((value[1].decode(), number, event[2]))
    return found


def test_the_checksum_is_the_standard_one():
    assert crc_32c(b"123456789") == 0xE3069283


@pytest.mark.mpi
@pytest.mark.replicas(2, 3)
def test_rank_0_writes_what_all_ranks_give(strategy, folder):
    assert summary.scalar("nowhere", 1.0, step=0) is False
    writer = summary.create_file_writer(folder / "logs", max_queue=3)
    with strategy.scope():
        step = mpidist.Variable(5, dtype="int64")
        mean = mpidist.metrics.Mean()
    strategy.run(lambda: mean.update_state([1.0, 2.0]))
    with writer.as_default():
        assert summary.scalar("mean", mean.result(), step=step)
        with strategy.scope():
            assert summary.scalar("variable", step, step=2**40)
        strategy.run(lambda: summary.scalar("in a replica", np.float32(-2.5), step=1))
    with writer.as_default(step=7):
        assert summary.get_step() == 7
        assert summary.scalar("array", np.array(4), description="of no dimensions")
        with summary.record_if(lambda: False):
            assert summary.scalar("left out", 1.0) is False
            assert not summary.should_record_summaries()
        losses = strategy.run(lambda: 1.0)
        with pytest.raises(
            TypeError, match=r"write `strategy\.reduce\(\"MEAN\", value"
        ):
            summary.scalar("of this rank alone", losses)
        with pytest.raises(TypeError, match="`name` to be a str, got 3"):
            summary.scalar(3, 1.0)
    assert summary.scalar("after", 1.0, step=0) is False
    writer.flush()
    writer.close()
    strategy.run(lambda: 0)  # all ranks are here
    assert read(folder / "logs") == [
        ("mean", 1.5, 5),
        ("variable", 5.0, 2**40),
        ("in a replica", -2.5, 1),
        ("array", 4.0, 7),
    ]


def test_default_writers_and_steps_are_set_and_set_back(tmp_path):
    outer = summary.create_file_writer(tmp_path / "outer")
    inner = summary.create_file_writer(tmp_path / "inner", filename_suffix=".mine")
    with outer.as_default():
        summary.set_step(1)
        with inner.as_default(step=9):
            summary.scalar("x", 1)
        summary.scalar("y", 2)
        with summary.create_noop_writer().as_default():
            assert summary.scalar("z", 3)
        summary.set_step(None)
        with pytest.raises(TypeError, match=r"write `step=optimizer\.iterations`"):
            summary.scalar("no step", 1)
        with pytest.raises(TypeError, match="create_file_writer: expected a path"):
            summary.create_file_writer(None)
        with pytest.raises(TypeError, match=r"`data` to be a number, got array"):
            summary.scalar("not one number", np.zeros(2), step=1)
    outer.close()
    inner.close()
    assert read(tmp_path / "outer") == [("y", 2.0, 1)]
    assert read(tmp_path / "inner") == [("x", 1.0, 9)]
    assert next((tmp_path / "inner").iterdir()).suffix == ".mine"


def test_bools_and_small_floats(tmp_path):
    values = [True, np.bool_(False), np.float16(2), mpidist.Variable(True)]
    with summary.create_file_writer(tmp_path).as_default(step=1):
        for value in values:
            summary.scalar("x", value)
        with pytest.raises(TypeError, match="`data` to be a number, got 1j"):
            summary.scalar("x", 1j)
    assert [number for _, number, _ in read(tmp_path)] == [1.0, 0.0, 2.0, 1.0]


def test_a_number_beyond_float32_is_infinite(tmp_path):
    with summary.create_file_writer(tmp_path).as_default(step=1):
        summary.scalar("loss", -1e40)
    assert read(tmp_path) == [("loss", -float("inf"), 1)]
    assert not next(tmp_path.iterdir()).stat().st_mode & 0o111


def test_other_kinds_say_what_to_write():
    with pytest.raises(AttributeError, match=r"strategy\.is_main_process"):
        summary.image("x", np.zeros((1, 2, 2, 3)), step=0)
