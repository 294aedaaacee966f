"""The runs of cleanrl_utils.benchmark as Ray tasks, on an existing cluster or a local one.

All nodes must see the folder that the benchmark is started in, under the same path: a run whose
node died is resumed from there on another node.
"""

import os
import socket
from collections import deque

from cleanrl_utils.benchmark import task


class Ray:
    pause = 0.5  # seconds between two looks

    def __init__(self, args, environment):
        try:
            import ray
        except ModuleNotFoundError:
            raise SystemExit(
                "ray is missing: pip install -r requirements/requirements-cluster.txt"
            ) from None
        self.ray, self.workers, self.queue, self.tasks = ray, args.workers, deque(), {}
        self.environment = {
            name: value for name, value in environment.items() if name != "CUDA_VISIBLE_DEVICES"
        }
        quiet = dict(
            log_to_driver=False,
            logging_level="ERROR",
            include_dashboard=None if args.ray_address else False,
        )
        try:
            host, _, port = (args.ray_address or "").removeprefix("ray://").partition(":")
            if port.isdigit():  # Ray itself would try for minutes
                socket.create_connection((host, int(port)), timeout=10).close()
            ray.init(address=args.ray_address, **quiet)
        except Exception as error:
            why = str(error).strip().splitlines() or [type(error).__name__]
            raise SystemExit(
                f"cannot reach Ray at {args.ray_address or 'this machine'}: {why[0]}"
            ) from None

        @ray.remote(num_cpus=args.ray_cpus_per_run, num_gpus=args.ray_gpus_per_run, max_retries=0)
        def attempt(words, folder, environment):  # on some node, where only Ray is sure to be there
            import os
            import subprocess
            import time

            # the pipe is the lifeline: when Ray's worker dies, the run ends
            pipes = dict(stdin=subprocess.PIPE, stderr=subprocess.PIPE)
            process = subprocess.Popen(
                words, cwd=folder, env=os.environ | environment, start_new_session=True, **pipes
            )
            try:
                while process.poll() is None:
                    time.sleep(0.2)
            finally:  # also when it is cancelled
                process.terminate()
                code = process.wait()
            return code, process.stderr.read().decode().strip()

        self.attempt = attempt

    def submit(self, runs):
        self.queue.extend(runs)

    def poll(self):
        for run, (answer, size) in list(self.tasks.items()):
            has_ended = bool(self.ray.wait([answer], timeout=0)[0])
            if size is not None and (
                has_ended or log_size(run) > size
            ):  # it has written its first line
                self.tasks[run] = answer, None
                yield run, None, ""
            if has_ended:
                del self.tasks[run]
                yield run, *self.outcome(answer)
        while self.queue and len(self.tasks) < self.workers:
            run = self.queue.popleft()
            words = [*task.START, "--lifeline", "--in", str(run.folder), *run.words]
            self.tasks[run] = (
                self.attempt.remote(words, os.getcwd(), self.environment),
                log_size(run),
            )

    def outcome(self, answer):
        try:
            return self.ray.get(answer)
        except self.ray.exceptions.RayError as error:  # its worker or its node is gone
            why = str(error).strip().splitlines() or [""]
            return 1, f"Ray: {type(error).__name__}: {why[0]}"

    def stop(self, in_a_hurry=lambda: False):
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
