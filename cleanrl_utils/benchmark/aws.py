"""The runs of cleanrl_utils.benchmark as array jobs of AWS Batch, with logs and checkpoints on S3.

    python -m cleanrl_utils.benchmark.aws s3://BUCKET/PREFIX/plans/PLAN.json

is what a container of the Dockerfile runs: the run at its index of the job array, restored from S3
if an earlier container was interrupted, and uploaded there at intervals. On S3, logs/ has one log
per run, in a folder for each --folder, and runs/ has the run folders.
"""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

from cleanrl_utils.benchmark import log, task
from cleanrl_utils.errors import explain, one_line

ENDED = {"SUCCEEDED", "FAILED"}
OF_THE_PROCESS = {"lock", "pid"}  # files of a run folder that mean nothing on another machine
PASSED_ON = ("WANDB_TAGS", "WANDB_MODE", "WANDB_PROJECT", "AWS_ENDPOINT_URL", "AWS_DEFAULT_REGION")


def connect(service, endpoint_url=None):
    with explain(f"use AWS's {service}"):
        import boto3

        return boto3.client(service, endpoint_url=endpoint_url)


def log_key(folder, log):
    """Where on S3 the log of a run is: each --folder has its own."""
    return f"logs/{str(folder).translate(str.maketrans('/:', '--'))}/{log.name}"


class Store:
    """Files of this machine and their copies on S3, under one prefix."""

    def __init__(self, address, endpoint_url=None):
        self.s3 = connect("s3", endpoint_url)
        self.bucket, _, self.prefix = address.removeprefix("s3://").partition("/")
        self.sent, self.fetched = {}, {}  # what is known of the files, by their path

    def key(self, path):
        return f"{self.prefix.rstrip('/')}/{path}".lstrip("/")

    def send(self, file, path):
        """Upload a file if it has changed since."""
        facts = file.stat()
        if self.sent.get(path) != (facts.st_size, facts.st_mtime_ns):
            self.s3.upload_file(str(file), self.bucket, self.key(path))
            self.sent[path] = facts.st_size, facts.st_mtime_ns

    def fetch(self, path, file):
        """Download a file if it has changed since; False if there is none."""
        try:
            tag = self.s3.head_object(Bucket=self.bucket, Key=self.key(path))["ETag"]
        except self.s3.exceptions.ClientError as error:
            if error.response["Error"]["Code"] not in ("404", "NoSuchKey"):
                raise
            return False
        if self.fetched.get(path) != tag:
            file.parent.mkdir(parents=True, exist_ok=True)
            self.s3.download_file(self.bucket, self.key(path), str(file))
            self.fetched[path] = tag
        return True

    def fetch_folder(self, name):
        folder, prefix = Path("runs", name), self.key(f"runs/{name}/")
        paginator = self.s3.get_paginator("list_objects_v2")
        for page in paginator.paginate(Bucket=self.bucket, Prefix=prefix):
            for found in page.get("Contents", ()):
                file = folder / found["Key"].removeprefix(prefix)
                if folder.resolve() in file.resolve().parents:
                    self.fetch(f"runs/{name}/{file.relative_to(folder)}", file)

    def send_run(self, path, key):
        """Upload the log and the run folder. The curves must reach as far as the checkpoint, which
        the run may replace meanwhile: the one from before is sent, after all else."""
        if folder := log.run_folder(path):
            held = [hold(file) for file in folder.glob("checkpoint.*") if file.suffix != ".tmp"]
            for file in folder.rglob("*"):
                is_ours = file.suffix != ".tmp" and file.name not in OF_THE_PROCESS
                if is_ours and file.stem != "checkpoint" and file.is_file():
                    self.send(file, f"runs/{folder.name}/{file.relative_to(folder)}")
            for file in held:
                self.send(file, f"runs/{folder.name}/{file.stem}")
                file.unlink()
        if path.exists():
            self.send(path, key)


def hold(file):
    """A second name for a file, checkpoint.pt.tmp, under which it stays what it is."""
    name = file.with_name(f"{file.name}.tmp")
    name.unlink(missing_ok=True)
    os.link(file, name)
    return name


class AwsBatch:
    def __init__(self, args, added, journal):
        for flag in ("aws_job_queue", "aws_job_definition", "aws_s3"):
            if not getattr(args, flag):
                raise SystemExit(f"--backend aws-batch needs --{flag.replace('_', '-')}")
        if not re.match(r"s3://[^/]+", args.aws_s3):
            raise SystemExit("--aws-s3 must look like s3://bucket/prefix")
        self.args, self.journal, self.jobs, self.began = args, journal, {}, set()
        self.pause = min(30, args.aws_sync_interval)
        passed = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
        self.environment = passed | added
        if args.aws_endpoint_url:
            self.environment["AWS_ENDPOINT_URL"] = args.aws_endpoint_url
        self.batch = connect("batch", args.aws_endpoint_url)
        self.store = Store(args.aws_s3, args.aws_endpoint_url)
        with explain(f"use {args.aws_s3}"):
            self.store.s3.head_bucket(Bucket=self.store.bucket)

    def submit(self, runs):
        self.jobs |= {run: run.job for run in runs if run.job}  # submitted by an earlier runner
        to_send = [run for run in runs if not run.job]
        for start in range(0, len(to_send), 10_000):  # the size of an array
            self.submit_array(to_send[start : start + 10_000])

    def submit_array(self, runs):
        plan = f"plans/{time.time_ns()}.json"
        facts = {"runs": [run.words for run in runs], "interval": self.args.aws_sync_interval}
        facts["folder"] = str(self.args.folder)
        address = f"s3://{self.store.bucket}/{self.store.key(plan)}"
        settings = {
            "jobName": "cleanrl-benchmark",
            "jobQueue": self.args.aws_job_queue,
            "jobDefinition": self.args.aws_job_definition,
            "containerOverrides": {
                "command": ["python", "-m", "cleanrl_utils.benchmark.aws", address],
                "environment": [{"name": k, "value": v} for k, v in self.environment.items()],
            },
        }
        if len(runs) > 1:  # AWS has no array of one
            settings["arrayProperties"] = {"size": len(runs)}
        with explain("submit the job to AWS Batch"):
            key, body = self.store.key(plan), json.dumps(facts).encode()
            self.store.s3.put_object(Bucket=self.store.bucket, Key=key, Body=body)
            job = self.batch.submit_job(**settings)["jobId"]
        for index, run in enumerate(runs):
            self.jobs[run] = run.job = f"{job}:{index}" if len(runs) > 1 else job
        events = [{"run": run.name, "event": "submitted", "job": run.job} for run in runs]
        self.journal.write(*events)

    def states(self):
        """{job: (status, reason)} of our jobs, as AWS Batch has them."""
        jobs, found = list(self.jobs.values()), {}
        for start in range(0, len(jobs), 100):
            for job in self.batch.describe_jobs(jobs=jobs[start : start + 100])["jobs"]:
                found[job["jobId"]] = job["status"], job.get("statusReason", "")
        return found

    def poll(self):
        try:
            states = self.states()
            for run, job in self.jobs.items():
                status = states.get(job, ("FAILED",))[0]
                if status in ENDED | {"RUNNING"}:
                    self.store.fetch(log_key(run.folder, run.log), run.log)
                folder = log.named_folder(run.log)
                if status in ENDED and folder and log.exit_code(run.log) == 0:
                    self.store.fetch_folder(folder.name)
        except Exception as error:  # the network, for a while: the runs do not suffer from that
            print(f"AWS does not answer: {one_line(error)}", file=sys.stderr)
            return
        for run, job in list(self.jobs.items()):
            status, why = states.get(job, ("FAILED", "the job is gone"))
            if status in ENDED | {"RUNNING"} and run not in self.began:
                self.began.add(run)
                yield run, None, ""
            if status in ENDED:
                del self.jobs[run]
                self.began.discard(run)
                run.job, code = None, log.exit_code(run.log)
                told = f"AWS Batch: {status} {why}".strip() + f" (job {job})"
                if code is None or code > 128:  # with its machine
                    yield run, code or 1, told
                else:
                    yield run, code, ""

    def stop(self, in_a_hurry):
        """End all jobs. Returns the runs that may still be running, if AWS does not answer."""
        try:
            for job in {job.split(":")[0] for job in self.jobs.values()}:  # an array as a whole
                self.batch.terminate_job(jobId=job, reason="cleanrl_utils.benchmark was stopped")
            for _ in range(60):
                if in_a_hurry() or all(status in ENDED for status, _ in self.states().values()):
                    return None
                time.sleep(1)
        except Exception as error:
            print(f"jobs may continue: {one_line(error)}", file=sys.stderr)
            return set(self.jobs)


def main(address):
    """In the container: one run, from its log on S3 to its log on S3."""
    bucket, _, plan_key = address.removeprefix("s3://").partition("/")
    prefix, _, name = plan_key.rpartition("plans/")
    store = Store(f"s3://{bucket}/{prefix}")
    plan = json.loads(store.s3.get_object(Bucket=bucket, Key=plan_key)["Body"].read())
    words = plan["runs"][int(os.environ.get("AWS_BATCH_JOB_ARRAY_INDEX", 0))]
    folder = Path("runs/benchmark")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{task.name_of(words)}.log"
    key = log_key(plan["folder"], path)
    if store.fetch(key, path) and (earlier := log.named_folder(path)):
        store.fetch_folder(earlier.name)
        with path.open("a") as file:  # here, whatever it was called there
            file.write(f"\nrun folder: {Path('runs', earlier.name)}\n")
    print(f"{name}: {shlex.join(words)}", flush=True)
    command = [*task.START, "--lifeline", "--in", folder, *words]
    watcher = subprocess.Popen(command, stdin=subprocess.PIPE)
    for number in (signal.SIGTERM, signal.SIGINT):  # what there is still reaches S3
        signal.signal(number, lambda *_: watcher.terminate())
    while True:
        try:
            code = watcher.wait(timeout=plan["interval"])
        except subprocess.TimeoutExpired:
            code = None
        try:
            store.send_run(path, key)
        except Exception as error:
            print(f"cannot write to {address}: {one_line(error)}", file=sys.stderr, flush=True)
            if code is not None:
                return code or 1
        if code is not None:
            return code


if __name__ == "__main__":
    if len(sys.argv) != 2:
        usage = "python -m cleanrl_utils.benchmark.aws s3://BUCKET/PREFIX/plans/PLAN.json"
        raise SystemExit(f"usage: {usage}")
    sys.exit(main(sys.argv[1]))
