"""The runs of cleanrl_utils.benchmark on this machine."""

import subprocess
import time
from collections import deque

from cleanrl_utils import processes
from cleanrl_utils.benchmark import task


class Local:
    """Runs on this machine: each in its own process group, with the GPUs divided among workers."""

    pause = 0.1  # seconds between two looks

    def __init__(self, args, environment):
        self.workers, self.environment = args.workers, environment
        self.queue = deque()
        self.busy = {}  # worker: (run, process)

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
                run = self.queue.popleft()
                self.busy[worker] = run, self.start(worker, run)
                yield run, None, ""

    def start(self, worker, run):
        command = [*task.START, "--lifeline", "--in", run.folder, *run.words]
        pipes = dict(stdin=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)
        gpu = processes.gpu_settings(worker, self.workers)
        return subprocess.Popen(command, env=self.environment | gpu, **pipes)

    def stop(self, in_a_hurry):
        self.queue.clear()
        started = [process for _, process in self.busy.values()]
        for process in started:
            processes.ask_to_end(process)
        while any(process.poll() is None for process in started):
            if in_a_hurry():
                for process in started:
                    process.stdin.close()  # the lifeline
            time.sleep(0.1)
