"""The runs of cleanrl_utils.benchmark as Ray tasks, on an existing cluster or a local one.

All nodes must see the folder that the benchmark is started in, under the same path: a run whose
node died is resumed from there on another node.
"""

import os
import socket
from collections import deque

from cleanrl_utils.benchmark import task
from cleanrl_utils.errors import explain, shorten


class Ray:
    pause = 0.5  # seconds between two looks

    def __init__(self, args, environment):
        with explain("use --backend ray"):
            import ray
        self.ray, self.workers, self.queue = ray, args.workers, deque()
        self.tasks = {}  # run: (answer, size of its log before it began)
        self.environment = dict(environment)
        self.environment.pop("CUDA_VISIBLE_DEVICES", None)  # Ray divides the GPUs
        if args.ray_gpus_per_run < 1:  # runs may share one: JAX must not take all of its memory
            self.environment.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        quiet = dict(log_to_driver=False, logging_level="ERROR")
        quiet["include_dashboard"] = None if args.ray_address else False
        with explain(f"reach Ray at {args.ray_address or 'this machine'}"):
            host, _, port = (args.ray_address or "").removeprefix("ray://").partition(":")
            if port.isdigit():  # Ray itself would try for minutes
                socket.create_connection((host, int(port)), timeout=10).close()
            ray.init(address=args.ray_address, **quiet)

        @ray.remote(num_cpus=args.ray_cpus_per_run, num_gpus=args.ray_gpus_per_run, max_retries=0)
        def attempt(words, folder, environment):  # on some node, where only Ray is sure to be there
            import os
            import subprocess
            import time

            # the pipe is the lifeline: when Ray's worker dies, the run ends
            pipes = dict(stdin=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)
            environment = os.environ | environment
            process = subprocess.Popen(words, cwd=folder, env=environment, **pipes)
            try:
                while process.poll() is None:
                    time.sleep(0.2)
            finally:  # also when it is cancelled
                process.terminate()
                code = process.wait()
            code = 128 - code if code < 0 else code
            return code, process.stderr.read().decode().strip()

        self.attempt = attempt

    def submit(self, runs):
        self.queue.extend(runs)

    def poll(self):
        for run, (answer, size) in list(self.tasks.items()):
            has_ended = bool(self.ray.wait([answer], timeout=0)[0])
            has_begun = has_ended or (size is not None and log_size(run) > size)
            if size is not None and has_begun:
                self.tasks[run] = answer, None
                yield run, None, ""
            if has_ended:
                del self.tasks[run]
                yield run, *self.outcome(answer)
        while self.queue and len(self.tasks) < self.workers:
            run = self.queue.popleft()
            words = [*task.START, "--lifeline", "--in", str(run.folder), *run.words]
            answer = self.attempt.remote(words, os.getcwd(), self.environment)
            self.tasks[run] = answer, log_size(run)

    def outcome(self, answer):
        try:
            return self.ray.get(answer)
        except self.ray.exceptions.RayError as error:  # its worker or its node is gone
            return 1, shorten(f"Ray: {type(error).__name__}: {error}", 200)

    def stop(self, in_a_hurry):
        answers = [answer for answer, _ in self.tasks.values()]
        for answer in answers:
            self.ray.cancel(answer)
        while answers and not in_a_hurry():
            _, answers = self.ray.wait(answers, timeout=0.2)
        for answer in answers:
            self.ray.cancel(answer, force=True)
        self.ray.shutdown()


def log_size(run):
    return run.log.stat().st_size if run.log.exists() else 0
