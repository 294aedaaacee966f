"""The log of a run, which holds its whole state: for each attempt a line `$ COMMAND`, the output
with the name of the run folder and the progress bar, and a line with the exit code."""

import os
import re
from pathlib import Path

from cleanrl_utils import processes

BAR = re.compile(
    r"([\d.]+)([kMG]?)/([\d.]+)([kMG]?) \[[^]]*?, +([\d.]+)([kMG]?)(step/s|s/step)"
    r"(?:, episodic_return=([^\],\s]+))?"
)
SCALE = {"": 1, "k": 1e3, "M": 1e6, "G": 1e9}


def named_folder(log):
    """The run folder that the last attempt to name one has named, or None."""
    named = re.findall(rb"^run folder: (.+?)\r?$", log.read_bytes(), re.M) if log.exists() else []
    return Path(os.fsdecode(named[-1])) if named else None


def run_folder(log):
    """That folder, if it is still there."""
    folder = named_folder(log)
    return folder if folder and (folder / "run.json").exists() else None


def tail(log, size=2**16):
    """The end of the last attempt's output."""
    if not log.exists():
        return ""
    with log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - size))
        text = "\n" + file.read().decode(errors="replace")
    attempt = text.rpartition("\n$ ")
    return attempt[2].partition("\n")[2] if attempt[1] else text


def progress(log):
    """Fraction of the steps done, steps per second and last return, or None, from the last bar."""
    bars = BAR.findall(tail(log, 4096))
    if not bars:
        return None, None, None
    done, done_scale, total, total_scale, rate, rate_scale, unit, episodic_return = bars[-1]
    share = float(done) * SCALE[done_scale] / max(float(total) * SCALE[total_scale], 1)
    rate = float(rate) * SCALE[rate_scale]
    steps_per_second = rate if unit == "step/s" else 1 / max(rate, 1e-9)
    return share, steps_per_second, float(episodic_return) if episodic_return else None


def exit_code(log):
    """The exit code of the last attempt, or None if it runs or was killed with its watcher."""
    found = re.search(r"\nexit code (\d+) after [\d.]+ s\n$", tail(log, 512))
    return int(found[1]) if found else None


def reason(log, code, words=()):
    """One line on why the last attempt failed."""
    script = next((word for word in words if word.endswith(".py")), None)
    return processes.why(tail(log), code, script)
