"""The runs of cleanrl_utils.benchmark on this machine."""

import os
import shutil
import signal
import subprocess
import time
from collections import deque

from cleanrl_utils.benchmark import task


class Local:
    """Runs on this machine: each in its own process group, with the GPUs divided among workers."""

    pause = 0.1  # seconds between two looks

    def __init__(self, args, environment):
        self.workers, self.environment, self.queue, self.busy = (
            args.workers,
            environment,
            deque(),
            {},
        )
        self.gpus = visible_gpus()

    def submit(self, runs):
        self.queue.extend(runs)

    def poll(self):
        """Yield (run, None, "") for runs that began, (run, exit code, why) for those that ended."""
        for worker, (run, process) in list(self.busy.items()):
            if process.poll() is not None:
                del self.busy[worker]
                code = process.returncode if process.returncode >= 0 else 128 - process.returncode
                yield run, code, process.communicate()[1].decode().strip()
        for worker in range(self.workers):
            if self.queue and worker not in self.busy:
                run, gpu = self.queue.popleft(), {}
                if self.gpus:
                    gpu = {"CUDA_VISIBLE_DEVICES": self.gpus[worker % len(self.gpus)]}
                command = [*task.START, "--lifeline", "--in", run.folder, *run.words]
                pipes = dict(stdin=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)
                self.busy[worker] = (
                    run,
                    subprocess.Popen(command, env=self.environment | gpu, **pipes),
                )
                yield run, None, ""

    def stop(self, in_a_hurry=lambda: False):
        self.queue.clear()
        for _, process in self.busy.values():
            process.send_signal(signal.SIGTERM)
        while any(process.poll() is None for _, process in self.busy.values()):
            if in_a_hurry():
                for _, process in self.busy.values():
                    process.stdin.close()  # the lifeline
            time.sleep(0.1)


def visible_gpus():
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        return [gpu for gpu in os.environ["CUDA_VISIBLE_DEVICES"].split(",") if gpu]
    if not shutil.which("nvidia-smi"):
        return []
    done = subprocess.run(
        ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"], capture_output=True, text=True
    )
    return done.stdout.split() if done.returncode == 0 else []
