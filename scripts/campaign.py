"""Train on a machine that is lent for minutes: start a benchmark or resume it, wait, pack the runs.

    python scripts/campaign.py "sh benchmark/ppo.sh --workers 4" --minutes 9 --out out
    python scripts/campaign.py "sh benchmark/ppo.sh --workers 4" --minutes 9 --out out --unpack kept

The same command is for every call: the first one unpacks what an earlier session has kept and
starts the benchmark, which goes on after the call, and later calls find it at work. Each call waits
until the benchmark or its minutes are over. Then it packs run.json, curves and journals of all
runs. The checkpoints of runs that no journal calls done are added as far as they fit, those of the
most steps first.

The parts in --out belong together: cat out/runs.tar.* | tar x
"""

import argparse
import os
import shlex
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))  # so that this runs from any folder
from cleanrl_utils.benchmark.runner import Journal  # noqa: E402
from cleanrl_utils.errors import explain  # noqa: E402
from cleanrl_utils.events import read_events  # noqa: E402
from cleanrl_utils.runs import find_runs, last_step  # noqa: E402

CURVES = ("run.json", "events.out.tfevents.*", "*.py")


class Parts:
    """A file that is written as runs.tar.00, runs.tar.01 and so on."""

    def __init__(self, folder, size):
        self.folder, self.size, self.part, self.number = folder, size, None, 0

    def write(self, data):
        for start in range(0, len(data), 2**16):
            if self.part is None or self.part.tell() >= self.size - 2**16:
                self.close()
                self.part = (self.folder / f"runs.tar.{self.number:02}").open("wb")
                self.number += 1
            self.part.write(data[start : start + 2**16])
        return len(data)

    def close(self):
        if self.part:
            self.part.close()


def unpack(folder):
    """What an earlier session has kept, unless this one has begun."""
    parts = sorted(Path(folder).glob("runs.tar.*"))
    if parts and not Path("runs").exists():
        data = b"".join(part.read_bytes() for part in parts)
        subprocess.run(["tar", "x"], input=data, check=True)


def is_running(pid_file):
    """Whether the process of an earlier call is still at work."""
    try:
        state = Path("/proc", pid_file.read_text(), "stat").read_text()
    except OSError:
        return False
    return state.rpartition(")")[2].split()[0] != "Z"


def start(command, pid_file):
    """In a session of its own, so that it goes on after this call."""
    with open("runs/campaign.log", "ab") as log, explain(f"start {command}"):
        words = shlex.split(command)
        process = subprocess.Popen(words, stdout=log, stderr=log, start_new_session=True)
    pid_file.write_text(str(process.pid))


def done_folders(runs):
    """The names of the run folders that a benchmark's journal calls done."""
    journals = [Journal(path.parent) for path in runs.glob("*/journal.jsonl")]
    events = [event for journal in journals for event in journal.last_events().values()]
    done = [event.get("folder") for event in events if event.get("event") == "done"]
    return {Path(folder).name for folder in done if folder}


def files_to_pack(runs, limit, links):
    """{name in the archive: file} of all curves and journals, and of the checkpoints that fit.

    Checkpoints are linked into the folder links before the curves are read: a run that is at work
    replaces its checkpoint, which must not be newer than the curves.
    """
    done, files, checkpoints = done_folders(runs), {}, []
    for path in [*runs.glob("*/journal.jsonl"), *runs.glob("*/*.log")]:
        files[path] = path
    for folder in find_runs(runs):
        kept = {}
        for path in folder.glob("checkpoint.[pm]*") if folder.name not in done else ():
            kept[path] = links / f"{folder.name}__{path.name}"
            os.link(path, kept[path])
        files |= {path: path for name in CURVES for path in folder.glob(name)}
        steps = last_step(read_events(folder, cache=False)[0])
        checkpoints += [(steps, path, link) for path, link in kept.items()]
        print(f"{folder.name}: {steps:,} steps{', finished' * (folder.name in done)}")
    free = limit - sum(path.stat().st_size + 2048 for path in files.values())
    if free < 0:
        print("curves and journals alone need more than --num-parts parts of --part-size")
    for _, path, link in sorted(checkpoints, reverse=True):
        if link.stat().st_size < free:
            free -= link.stat().st_size + 2048
            files[path] = link
        else:
            print(f"left out, for lack of room: {path}")
    return files


def pack(runs, out, part_size, num_parts):
    """Replace the parts in a folder, when all new ones are written."""
    out.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(dir=runs, prefix=".links") as links,
        tempfile.TemporaryDirectory(dir=out, prefix=".parts") as new,
    ):
        parts = Parts(Path(new), part_size)
        files = files_to_pack(runs, (part_size - 2**17) * num_parts, Path(links))
        with tarfile.open(fileobj=parts, mode="w|") as archive:
            for name, path in files.items():
                archive.add(path, name)
        parts.close()
        for part in out.glob("runs.tar.*"):
            part.unlink()
        for part in Path(new).iterdir():
            part.rename(out / part.name)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("command", help="what to start, such as sh benchmark/ppo.sh --workers 4")
    parser.add_argument("--minutes", type=float, default=9, help="how long to wait")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of the parts")
    parser.add_argument("--unpack", type=Path, help="folder of an earlier session's parts")
    parser.add_argument("--part-size", type=float, default=15, help="MiB a part")
    parser.add_argument("--num-parts", type=int, default=4, help="at most, if the curves fit")
    args = parser.parse_args()

    end = time.time() + 60 * args.minutes
    if args.unpack:
        unpack(args.unpack)
    Path("runs").mkdir(exist_ok=True)
    pid_file = Path("runs", "campaign.pid")
    if not is_running(pid_file):
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        start(args.command, pid_file)
    while is_running(pid_file) and time.time() < end:
        time.sleep(0.5)
    pack(Path("runs"), args.out, int(args.part_size * 2**20), args.num_parts)
    print("still at work" if is_running(pid_file) else "ended; runs/campaign.log has its output")
