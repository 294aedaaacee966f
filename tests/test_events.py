"""The fast reader of event files: TensorBoard's values, no damaged ones, no code from a cache."""

import os
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.plugins.scalar import metadata as scalars_plugin
from tensorboard.summary.writer.event_file_writer import EventFileWriter
from tensorboard.util.tensor_util import make_tensor_proto
from torch.utils.tensorboard import SummaryWriter

from cleanrl_utils.events import CACHE, checksums, parse, read_events
from tests.harness import PPO, only_run, scalars, train


def write(folder, steps, purge_step=None, tags=("charts/episodic_return", "charts/SPS")):
    """An event file as ppo.py writes it: the value of a step is its half."""
    with SummaryWriter(folder, purge_step=purge_step) as writer:
        for step in steps:
            for tag in tags:
                writer.add_scalar(tag, step / 2, step)
    return sorted(Path(folder).glob("events*"))[-1]


def shown(folder):
    """Ours in the form of the harness's scalars, which are TensorBoard's."""
    read, _ = read_events(folder, cache=False)
    return {tag: [(int(step), value) for step, value, _ in rows] for tag, rows in read.items()}


def test_checksum_is_the_published_one():
    data = np.frombuffer(b"123456789" + b"\0" * 32, np.uint8)
    crc = np.array(
        [0xE3069283, 0x8A9136AA], dtype=np.uint64
    )  # CRC-32C's check value, and that of 32 zeros (RFC 3720)
    masked = ((crc >> np.uint64(15) | crc << np.uint64(17)) + np.uint64(0xA282EAD8)) & np.uint64(
        0xFFFFFFFF
    )
    assert checksums(data, np.array([0, 9]), np.array([9, 32])).tolist() == masked.tolist()


def test_ppo_is_read_as_tensorboard_reads_it(tmp_path):
    train(PPO, tmp_path, "--total-timesteps", 2048)
    run = only_run(tmp_path)
    assert shown(run) == scalars(run)
    assert len(shown(run)) == 11 and len(shown(run)["charts/episodic_return"]) > 50
    assert read_events(run)[1] == []


def test_a_resume_hides_what_was_logged_after_the_checkpoint(tmp_path):
    write(tmp_path, range(1, 101), purge_step=1)
    write(tmp_path, range(51, 81), purge_step=51)
    write(
        tmp_path, range(3), tags=["eval/episodic_return"]
    )  # enjoy's file starts no session: it hides nothing
    assert [step for step, _ in shown(tmp_path)["charts/episodic_return"]] == list(range(1, 81))
    assert shown(tmp_path) == scalars(tmp_path)


def test_all_that_a_writer_can_write_is_read_as_tensorboard_reads_it(tmp_path):
    nans = (
        np.array([0x7FC00000, 0xFFC00000], dtype=np.uint32).view(np.float32).tolist()
    )  # of either sign
    with SummaryWriter(tmp_path) as writer:
        writer.add_text("text", "no scalar")
        writer.add_histogram("histogram", np.arange(10.0), 1)
        writer.add_image("image", np.zeros((3, 64, 64), dtype=np.uint8), 1)
        for step in (0, 1, 127, 128, 16_383, 16_384, 2**31, 2**40):
            writer.add_scalar("a", step, step)
        for i in range(300):  # more tags of one length than layouts
            writer.add_scalar(f"tag {i:03}", i, i)
            writer.add_scalar(f"tag {i:03}", -i, i + 1)
        writer.add_scalar("long " * 40, 1, 1)
        writer.add_scalar("ünicode", 1, 1)
    writer = EventFileWriter(str(tmp_path), filename_suffix=".several")
    for step, value in enumerate([0.0, 1e30, -1.5, float("inf"), *nans], start=1):
        values = [Summary.Value(tag=tag, simple_value=value) for tag in ("b", "bb", "a b", "b")]
        writer.add_event(Event(wall_time=step, step=step, summary=Summary(value=values)))
    writer.close()
    read, expected = shown(tmp_path), scalars(tmp_path)
    assert read.keys() == expected.keys() and len(read) == 306
    assert all(np.array_equal(read[tag], expected[tag], equal_nan=True) for tag in expected)


def test_tensors_of_tensorflow_2_are_scalars_too(tmp_path):
    """As tf.summary writes them, for JAX too: a tensor of rank 0 and its plugin's name."""
    writer = EventFileWriter(str(tmp_path))
    tensors = {
        "loss": make_tensor_proto(0.5, np.float32),
        "count": make_tensor_proto(2**40, np.int64),
        "vector": make_tensor_proto([1.0, 2.0], np.float32),
        "text": make_tensor_proto("no number"),
    }
    for step in (1, 300):
        for tag, tensor in tensors.items():
            metadata = scalars_plugin.create_summary_metadata("", "")
            value = Summary.Value(tag=tag, tensor=tensor, metadata=metadata)
            writer.add_event(Event(wall_time=step, step=step, summary=Summary(value=[value])))
        image = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="images"))
        value = Summary.Value(tag="image", tensor=tensors["loss"], metadata=image)
        writer.add_event(Event(wall_time=step, step=step, summary=Summary(value=[value])))
    writer.close()
    with SummaryWriter(tmp_path) as torch_writer:
        torch_writer.add_scalar("new", 0.25, 7, new_style=True)
    expected = {"loss": [(1, 0.5), (300, 0.5)], "count": [(1, 2**40), (300, 2**40)]}
    assert shown(tmp_path) == expected | {"new": [(7, 0.25)]}
    assert read_events(tmp_path)[1] == []


def test_seconds_stand_still_between_stop_and_resume(tmp_path):
    for start, steps in ((1000.0, range(1, 4)), (9000.0, range(3, 6))):
        writer = EventFileWriter(str(tmp_path))
        start_log = SessionLog(status=SessionLog.START)
        writer.add_event(Event(wall_time=start, step=steps[0], session_log=start_log))
        for i, step in enumerate(steps):
            values = [Summary.Value(tag=tag, simple_value=step) for tag in ("a", "b")]
            writer.add_event(
                Event(wall_time=start + 10 * i, step=step, summary=Summary(value=values))
            )
        writer.close()
    read, problems = read_events(tmp_path)
    assert problems == [] and list(read) == ["a", "b"]
    assert (
        read["a"].tolist()
        == read["b"].tolist()
        == [[1, 1, 0], [2, 2, 10], [3, 3, 10], [4, 4, 20], [5, 5, 30]]
    )


def test_half_written_file_is_read_as_far_as_it_goes(tmp_path):
    path = write(tmp_path, range(1, 101))
    path.write_bytes(path.read_bytes()[:-7])
    read, problems = read_events(tmp_path)
    assert len(read["charts/episodic_return"]) == 100 and len(read["charts/SPS"]) == 99
    assert len(problems) == 1 and problems[0].startswith(
        f"{path.name} breaks off in the middle of a record"
    )


def test_a_damaged_record_is_left_out_and_a_damaged_length_ends_the_file(tmp_path):
    path = write(tmp_path, range(1, 101))
    content, tag = bytearray(path.read_bytes()), b"charts/SPS"
    at = [i for i in range(len(content)) if content[i : i + len(tag)] == tag]
    content[at[9] + 12] ^= 1  # in the value of step 10
    path.write_bytes(content)
    read, problems = read_events(tmp_path)
    assert [step for step, *_ in read["charts/SPS"]] == [*range(1, 10), *range(11, 101)]
    assert problems == [f"{path.name} has 1 damaged records among 201"]

    record = content.rfind(
        content[:8][1:8], 0, at[49]
    )  # the length of the record of step 50, by its seven zero bytes
    content[record - 1] ^= 1
    path.write_bytes(content)
    read, problems = read_events(tmp_path)
    assert len(read["charts/SPS"]) == 48 and "is damaged from byte" in problems[0]


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_no_damage_is_fatal_or_makes_up_numbers(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("damaged")
    path = write(folder, range(1, 21))
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    content = content[: data.draw(st.integers(0, len(content)))]
    path.write_bytes(content)
    read, _ = parse([path])
    assert set(read) <= {"charts/episodic_return", "charts/SPS"}
    assert all(
        value == step / 2 and step in range(1, 21)
        for rows in read.values()
        for step, value, _ in rows
    )


def test_what_is_no_event_file_is_named(tmp_path):
    assert read_events(tmp_path) == ({}, ["there is no event file"])
    (tmp_path / "events.out.tfevents.0").write_bytes(
        b"\x80 not an event file at all, but long enough to be one"
    )
    (tmp_path / "events.out.tfevents.1").write_bytes(b"")
    (tmp_path / "events.out.tfevents.2").mkdir()
    read, problems = read_events(tmp_path)
    assert (
        read == {}
        and len(problems) == 1
        and problems[0].startswith("events.out.tfevents.0 breaks off")
    )


def spoil(path):
    """Other content of the same size and time: who reads it now, reads the cache."""
    stamp = path.stat()
    path.write_bytes(b"\0" * stamp.st_size)
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))


def test_cache_serves_until_the_files_change(tmp_path):
    path = write(tmp_path, range(1, 101))
    first, _ = read_events(tmp_path)
    content = path.read_bytes()
    spoil(path)
    again, problems = read_events(tmp_path)
    assert problems == [] and list(again) == list(first)
    assert all(np.array_equal(again[tag], rows) for tag, rows in first.items())
    path.write_bytes(content)
    write(tmp_path, range(101, 111))
    assert len(read_events(tmp_path)[0]["charts/SPS"]) == 110
    assert not list(tmp_path.glob("*.tmp"))


class Trap:
    def __reduce__(self):
        return Path.touch, (Path("trapped"),)


@pytest.mark.parametrize(
    "kind", ["pickle", "bytes", "columns", "compressed", "link", "folder", "pipe"]
)
def test_hostile_cache_is_passed_over(tmp_path, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)
    run, cache = tmp_path / "run", tmp_path / "run" / CACHE
    write(run, range(1, 11))
    expected, _ = read_events(run)
    with np.load(cache) as file:
        about, rows = file["about"], file["0"]
    cache.unlink()
    if kind == "pickle":
        np.savez(cache, about=about, **{"0": np.array([[Trap()]], dtype=object), "1": rows})
    elif kind == "bytes":
        cache.write_bytes(os.urandom(500))
    elif kind == "columns":
        np.savez(cache, about=about, **{"0": rows[:, :2], "1": rows})
    elif kind == "compressed":
        np.savez_compressed(cache, about=about, **{"0": 0 * rows, "1": rows})
    elif kind == "link":
        np.savez(tmp_path / "elsewhere.npz", about=about, **{"0": 0 * rows, "1": rows})
        cache.symlink_to(tmp_path / "elsewhere.npz")
    elif kind == "folder":
        cache.mkdir()
    elif not hasattr(os, "mkfifo"):
        pytest.skip("there are no named pipes here")
    else:
        os.mkfifo(cache)
    elsewhere = (tmp_path / "elsewhere.npz").read_bytes() if kind == "link" else None
    read, problems = read_events(run)
    assert problems == [] and all(np.array_equal(read[tag], expected[tag]) for tag in expected)
    assert not (tmp_path / "trapped").exists() and not list(run.glob("*.tmp"))
    if kind == "link":
        assert (tmp_path / "elsewhere.npz").read_bytes() == elsewhere


def test_reading_is_faster_than_tensorboards(tmp_path):
    write(tmp_path, range(1, 10_001))
    ratios = []
    for _ in range(3):
        start = time.process_time()
        read_events(tmp_path, cache=False)
        ours = time.process_time() - start
        start = time.process_time()
        scalars(tmp_path)
        ratios.append((time.process_time() - start) / ours)
    assert max(ratios) > 4, ratios
