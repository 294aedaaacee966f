"""Run a file while a thread looks 200 times a second at what the main thread is doing.

    python -m cleanrl_utils.check.sampler profile.json my_ppo.py --seed 1

The profile holds the share of each part of the training loop, by the comments of the file's main
block (# act, # learn, # log ...); calls of the environments and of the logger count as theirs."""

import json
import re
import runpy
import sys
import threading
from collections import Counter
from pathlib import Path

PARTS = {
    "act": "acting",
    "estimate": "learning",
    "learn": "learning",
    "remember": "remembering",
    "log": "logging",
}
ENVIRONMENT = re.compile(r"envs?\.(step|recv|send|async)|pool\w*\.(step|recv|send)|\.step\(actions")
LOGGING = re.compile(r"writer\.|progress\.|save_checkpoint|log_videos|check_finite")


def find_parts(source):
    """The part of each line, by the last comment above it that starts with a known word."""
    parts, part, in_main, names = [], "other", False, "(act|estimate|learn|remember|log)"
    for line in source.splitlines():
        in_main = in_main or line.startswith("if __name__")
        comment = re.match(rf"\s+# {names}\b(.*)", line) if in_main else None
        if comment:
            part = PARTS[comment[1]]
            if part == "acting" and "learn" in comment[2]:
                part = "acting and learning, in one program"
        if ENVIRONMENT.search(line):
            parts.append("environment")
        else:
            parts.append("logging" if LOGGING.search(line) else part)
    return parts


def sample(file, parts, counts, main_thread, stopped):
    sys.setswitchinterval(1e-5)  # else the file is only seen where PyTorch lets others run
    while not stopped.wait(0.002):
        frame, of_file = sys._current_frames().get(main_thread), []
        while frame is not None:
            if frame.f_code.co_filename == file:
                of_file.append(frame)
            frame = frame.f_back
        if of_file and of_file[-1].f_code.co_name == "<module>":
            inner = [parts[frame.f_lineno - 1] for frame in of_file]
            main = inner[-1]
            part = "environment" if "environment" in inner else main
            if counts or part != "other":  # what comes before the loop does not count
                counts[part] += 1


def main():
    output, file, *flags = sys.argv[1:]
    sys.argv = [file, *flags]
    sys.path.append(str(Path(file).parent))  # with what the file may import
    counts = Counter()
    parts = find_parts(Path(file).read_text())
    arguments = file, parts, counts, threading.main_thread().ident, threading.Event()
    threading.Thread(target=sample, args=arguments, daemon=True).start()
    try:
        runpy.run_path(file, run_name="__main__")
    finally:
        Path(output).write_text(json.dumps(counts))


if __name__ == "__main__":
    main()
