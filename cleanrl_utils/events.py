"""Read the scalars of a run folder from its TensorBoard files, faster than TensorBoard does.

    from cleanrl_utils.events import read_events
    scalars, problems = read_events("runs/<run>")
    scalars["charts/episodic_return"]  # an array with a row (step, value, seconds) for each

What a resumed run had logged after its checkpoint is hidden, as in TensorBoard. The result is
cached beside the run in events.cache.npz for as long as the event files stay the same. Damaged
files are read as far as they are intact, and named in problems.

A worked example: add_scalar("loss", 0.5, 300) at second 1e9 appends these 43 bytes to the file.

    1b 00 00 00 00 00 00 00                          length of the content, 27 bytes
    1a 0d 9e 13                                      checksum of the length
    09  00 00 00 00 65 cd cd 41                      second 1e9, a double
    10  ac 02                                        step 300, 7 bits a byte: 0x2c + (0x02 << 7)
    2a 0d  0a 0b  0a 04 6c 6f 73 73  15 00 00 00 3f  a summary of one scalar: "loss", 0.5, a float
    94 e7 b4 b0                                      checksum of the content

A run logs the same few tags again and again, so that nearly all records differ only in second, step
and value. read_records finds where each record starts and checks all checksums at once. decode
takes the records of one length, parses the first with protobuf, finds the places of its numbers
(find_layout), and reads them from all records that agree with it in every other byte, as one array
each. The next record that is left is the first of another layout. parse puts the files of a folder
together, and read_events adds the cache.
"""

import json
import os
import struct
import zipfile
from pathlib import Path

import numpy as np
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.util.tensor_util import make_ndarray

CACHE, FORMAT = "events.cache.npz", 2
LARGEST_SCALARS = 4096  # bytes; longer records are images and the like
MOST_LAYOUTS = 100  # of records of one length; if there are more, the others are parsed one by one
CASTAGNOLI = 0x82F63B78  # the polynomial of CRC-32C, bits reversed


def make_crc_table():
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = (table >> 1) ^ (table & 1) * np.uint32(CASTAGNOLI)
    return table


CRC_TABLE = make_crc_table()


def checksums(data, starts, lengths):
    """TFRecord's masked CRC-32C of many pieces of data, byte by byte, but all pieces at once."""
    order = np.argsort(-lengths, kind="stable")
    starts, crc = starts[order], np.full(len(order), 0xFFFFFFFF, dtype=np.uint32)
    positions = np.arange(lengths.max(initial=0))
    num_longer = np.searchsorted(-lengths[order], -positions, side="left")  # than i bytes
    for i, n in enumerate(num_longer):
        crc[:n] = CRC_TABLE[(crc[:n] ^ data[starts[:n] + i]) & 0xFF] ^ (crc[:n] >> 8)
    crc = ~crc
    masked = ((crc >> 15) | (crc << 17)) + np.uint32(0xA282EAD8)
    return masked[np.argsort(order)]


def read_records(path):
    """The bytes of an event file, starts and lengths of its intact records, and a problem or None.

    A record is its length (8 bytes), the length's checksum (4), content and its checksum (4).
    """
    content = path.read_bytes()
    data = np.frombuffer(content, np.uint8)
    read_length = struct.Struct("<Q").unpack_from
    starts, lengths, position, problem = [], [], 0, None
    while position + 16 <= len(content):
        (length,) = read_length(content, position)
        if position + 16 + length > len(content):
            break
        starts.append(position + 12)
        lengths.append(length)
        position += 16 + length
    if position < len(content):
        at = f"at byte {position:,} of {len(content):,}"
        problem = f"{path.name} breaks off in the middle of a record, {at}"
    starts, lengths = np.array(starts, dtype=np.int64), np.array(lengths, dtype=np.int64)

    def stored(positions):
        return data[positions[:, None] + np.arange(4)].copy().view("<u4")[:, 0]

    bad_lengths = checksums(data, starts - 12, np.full(len(starts), 8)) != stored(starts - 4)
    if bad_lengths.any():  # where the next record starts is no longer known
        first = int(bad_lengths.argmax())
        problem = f"{path.name} is damaged from byte {starts[first] - 12:,} of {len(content):,} on"
        starts, lengths = starts[:first], lengths[:first]
    short = lengths <= LARGEST_SCALARS
    starts, lengths = starts[short], lengths[short]
    damaged = checksums(data, starts, lengths) != stored(starts + lengths)
    if damaged.any() and not problem:
        problem = f"{path.name} has {damaged.sum():,} damaged records among {len(damaged):,}"
    return data, starts[~damaged], lengths[~damaged], problem


def find_layout(record, event):
    """The layout of a record of scalars: number of bytes of its step, and (tag, value's position).

    As TensorBoard writes it: 09 and 8 bytes of time, 10 and the step in 7 bits a byte, then for
    each scalar 0a, the length of its tag, the tag, 15 and 4 bytes of value. None for other records.
    """
    step_bytes = next((i + 1 for i, byte in enumerate(record[10:20]) if byte < 128), 0)
    step = sum((byte & 127) << 7 * i for i, byte in enumerate(record[10 : 10 + step_bytes]))
    if record[:10] != b"\x09" + struct.pack("<d", event.wall_time) + b"\x10" or step != event.step:
        return None
    places, position = [], 10 + step_bytes
    for value in event.summary.value:
        tag, number = value.tag.encode(), struct.pack("<f", value.simple_value)
        written = b"\x0a" + bytes([min(len(tag), 127)]) + tag + b"\x15" + number
        position = record.find(written, position) + len(written)
        if position < len(written):  # it is not there
            return None
        places.append((value.tag, position - 4))
    return (step_bytes, places) if places else None


def find_number(value):
    """The number of a summary, also in TensorFlow 2's form, a tensor; None where it has none."""
    if value.HasField("simple_value"):
        return value.simple_value
    is_scalar = value.metadata.plugin_data.plugin_name == "scalars"
    if not is_scalar or value.tensor.tensor_shape.dim:
        return None
    try:
        return float(make_ndarray(value.tensor))
    except (TypeError, ValueError):  # a text
        return None


def decode(data, starts, lengths):
    """{tag: [arrays of rows (record, step, value, time)]}, restarts as (record, step), bad records.

    One record of each layout is parsed; those that differ from it only in their numbers are decoded
    all at once in the same way. The third value counts the records that are not events.
    """
    scalars, restarts, unreadable = {}, [], 0
    for length in np.unique(lengths):
        numbers = np.flatnonzero(lengths == length)
        rows = data[starts[numbers][:, None] + np.arange(length)]
        is_read, layouts = np.zeros(len(rows), dtype=bool), 0
        for k, number in enumerate(numbers):
            if is_read[k]:
                continue
            record = rows[k].tobytes()
            try:
                event = Event.FromString(record)
            except Exception:  # protobuf's own
                unreadable += 1
                continue
            layout = find_layout(record, event) if layouts < MOST_LAYOUTS else None
            if not layout:
                for value in event.summary.value:
                    if (scalar := find_number(value)) is not None:
                        row = [number, event.step, scalar, event.wall_time]
                        scalars.setdefault(value.tag, []).append(np.array([row], dtype=np.float64))
                if event.session_log.status == SessionLog.START:
                    restarts.append((number, event.step))
                continue
            layouts += 1
            step_at, places = slice(10, 10 + layout[0]), layout[1]
            is_number = np.zeros(length, dtype=bool)
            for part in (slice(1, 9), step_at, *(slice(at, at + 4) for _, at in places)):
                is_number[part] = True
            alike = ~is_read & (rows[:, ~is_number] == rows[k, ~is_number]).all(1)
            alike &= ((rows[:, step_at] < 128) == (rows[k, step_at] < 128)).all(1)
            is_read |= alike
            digits = rows[alike, step_at].astype(np.int64) & 127
            step = (digits << 7 * np.arange(layout[0])).sum(1)
            wall_time = rows[alike, 1:9].copy().view("<f8")[:, 0]
            for tag, at in places:
                value = rows[alike, at : at + 4].copy().view("<f4")[:, 0]
                columns = [numbers[alike], step, value, wall_time]
                scalars.setdefault(tag, []).append(np.stack(columns, axis=1))
    return scalars, sorted(restarts), unreadable


def parse(paths):
    """{tag: array of rows (step, value, seconds)} and problems; a run's pauses do not count."""
    scalars, problems = {}, []
    for path in paths:
        try:
            *records, problem = read_records(path)
            found, restarts, unreadable = decode(*records)
        except OSError as error:
            problems.append(f"{path.name} cannot be read: {error.strerror}")
            continue
        if problem:
            problems.append(problem)
        if unreadable:
            problems.append(f"{path.name} has {unreadable:,} records that are not events")
        new = {tag: np.concatenate(rows) for tag, rows in found.items()}
        new = {tag: rows[np.argsort(rows[:, 0], kind="stable")] for tag, rows in new.items()}
        for number, step in restarts:  # what came before, at this step or later, is void
            scalars = {tag: rows[rows[:, 0] < step] for tag, rows in scalars.items()}
            for tag, rows in new.items():
                new[tag] = rows[(rows[:, 0] > number) | (rows[:, 1] < step)]
        elapsed = max((rows[-1, 2] for rows in scalars.values() if len(rows)), default=0.0)
        start = min((rows[0, 3] for rows in new.values() if len(rows)), default=0.0)
        for tag, rows in new.items():
            rows = np.stack([rows[:, 1], rows[:, 2], elapsed + rows[:, 3] - start], axis=1)
            scalars[tag] = np.concatenate([scalars[tag], rows]) if tag in scalars else rows
    return {tag: rows for tag, rows in scalars.items() if len(rows)}, problems


def read_cache(path, stamps):
    """What parse returned for files with these stamps, or None. An untrusted cache runs no code."""
    try:
        if path.is_symlink() or not path.is_file():
            return None
        with zipfile.ZipFile(path) as parts:  # compressed parts could be a bomb
            if any(part.compress_type != zipfile.ZIP_STORED for part in parts.infolist()):
                return None
        with np.load(path, allow_pickle=False) as cache:
            about = json.loads(cache["about"].tobytes())
            if about["format"] != FORMAT or about["stamps"] != stamps:
                return None
            scalars = {str(tag): cache[str(i)] for i, tag in enumerate(about["tags"])}
        for rows in scalars.values():
            if rows.dtype != np.float64 or rows.ndim != 2 or rows.shape[1] != 3:
                return None
        return scalars, [str(problem) for problem in about["problems"]]
    except Exception:
        return None


def write_cache(path, stamps, scalars, problems):
    about = {"format": FORMAT, "stamps": stamps, "tags": list(scalars), "problems": problems}
    about = json.dumps(about).encode()
    arrays = {str(i): rows for i, rows in enumerate(scalars.values())}
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        temporary.unlink(missing_ok=True)  # never write through an untrusted link
        with temporary.open("xb") as file:
            np.savez(file, about=np.frombuffer(about, np.uint8), **arrays)
        os.replace(temporary, path)
    except OSError:  # a folder of someone else's, a full disk: it works without
        temporary.unlink(missing_ok=True)


def read_events(folder, cache=True):
    """{tag: array of rows (step, value, seconds)} of a run folder, and problems of its files."""
    folder = Path(folder)
    paths = sorted(path for path in folder.glob("*tfevents*") if path.is_file())
    if not paths:
        return {}, ["there is no event file"]
    stamps = [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in paths]
    cached = read_cache(folder / CACHE, stamps) if cache else None
    if cached is None:
        cached = parse(paths)
        if cache:
            write_cache(folder / CACHE, stamps, *cached)
    return cached
