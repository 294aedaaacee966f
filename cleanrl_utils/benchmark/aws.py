"""The runs of cleanrl_utils.benchmark as array jobs of AWS Batch, with logs and checkpoints on S3.

    python -m cleanrl_utils.benchmark.aws s3://BUCKET/PREFIX/plans/PLAN.json

is what a container of the Dockerfile runs: the run at its index of the job array, restored from S3
if an earlier container was interrupted, and uploaded there at intervals. On S3, logs/ has one log
per run and runs/ the run folders.
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

from cleanrl_utils.benchmark import task

ENDED = {"SUCCEEDED", "FAILED"}
OF_THE_PROCESS = {"lock", "pid"}  # files of a run folder that mean nothing on another machine
PASSED_ON = ("WANDB_TAGS", "WANDB_MODE", "WANDB_PROJECT", "AWS_ENDPOINT_URL", "AWS_DEFAULT_REGION")


def connect(service, endpoint_url=None):
    try:
        import boto3
    except ModuleNotFoundError:
        raise SystemExit(
            "boto3 is missing: pip install -r requirements/requirements-cluster.txt"
        ) from None
    return boto3.client(service, endpoint_url=endpoint_url)


def one_line(error):
    return f"{type(error).__name__}: {error}".splitlines()[0]


class Store:
    """Files of this machine and their copies on S3, under one prefix."""

    def __init__(self, address, endpoint_url=None):
        self.s3, (self.bucket, _, self.prefix) = (
            connect("s3", endpoint_url),
            address.removeprefix("s3://").partition("/"),
        )
        self.sent, self.fetched = {}, {}

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
        pages = self.s3.get_paginator("list_objects_v2").paginate(
            Bucket=self.bucket, Prefix=self.key(f"runs/{name}/")
        )
        for found in (found for page in pages for found in page.get("Contents", ())):
            file = Path("runs", name, found["Key"].removeprefix(self.key(f"runs/{name}/")))
            if Path("runs", name).resolve() in file.resolve().parents:
                self.fetch(f"runs/{name}/{file.relative_to(Path('runs', name))}", file)

    def send_run(self, log):
        """Upload the log and the run folder, its checkpoint last: the curves must reach as far."""
        if folder := task.run_folder(log):
            files = [
                path
                for path in folder.rglob("*")
                if path.is_file() and path.suffix != ".tmp" and path.name not in OF_THE_PROCESS
            ]
            for file in sorted(files, key=lambda file: file.stem == "checkpoint"):
                self.send(file, f"runs/{folder.name}/{file.relative_to(folder)}")
        if log.exists():
            self.send(log, f"logs/{log.name}")


def folder_name(log):
    """The name of the run folder that a log tells of, wherever that was."""
    named = (
        re.findall(r"^run folder: (.+?)\r?$", log.read_text(errors="replace"), re.M)
        if log.exists()
        else []
    )
    return Path(named[-1]).name if named else None


class AwsBatch:
    def __init__(self, args, added, journal):
        for flag in ("aws_job_queue", "aws_job_definition", "aws_s3"):
            if not getattr(args, flag):
                raise SystemExit(f"--backend aws-batch needs --{flag.replace('_', '-')}")
        if not re.match(r"s3://[^/]+", args.aws_s3):
            raise SystemExit("--aws-s3 must look like s3://bucket/prefix")
        self.args, self.journal, self.jobs, self.began = args, journal, {}, set()
        self.pause = min(30, args.aws_sync_interval)
        passed = {name: os.environ[name] for name in PASSED_ON if name in os.environ} | added
        self.environment = passed | (
            {"AWS_ENDPOINT_URL": args.aws_endpoint_url} if args.aws_endpoint_url else {}
        )
        try:
            self.batch, self.store = (
                connect("batch", args.aws_endpoint_url),
                Store(args.aws_s3, args.aws_endpoint_url),
            )
            self.store.s3.head_bucket(Bucket=self.store.bucket)
        except Exception as error:  # of many kinds, all of which mean the same
            raise SystemExit(f"cannot use {args.aws_s3}: {one_line(error)}") from None

    def submit(self, runs):
        self.jobs |= {run: run.job for run in runs if run.job}  # an earlier runner sent them
        to_send = [run for run in runs if not run.job]
        for start in range(0, len(to_send), 10_000):  # the size of an array
            self.submit_array(to_send[start : start + 10_000])

    def submit_array(self, runs):
        plan = f"plans/{time.time_ns()}.json"
        facts = {"runs": [run.words for run in runs], "interval": self.args.aws_sync_interval}
        address = f"s3://{self.store.bucket}/{self.store.key(plan)}"
        overrides = {
            "command": ["python", "-m", "cleanrl_utils.benchmark.aws", address],
            "environment": [
                {"name": name, "value": value} for name, value in self.environment.items()
            ],
        }
        names = dict(
            jobName="cleanrl-benchmark",
            jobQueue=self.args.aws_job_queue,
            jobDefinition=self.args.aws_job_definition,
        )
        array = (
            {"arrayProperties": {"size": len(runs)}} if len(runs) > 1 else {}
        )  # AWS has no array of one
        try:
            self.store.s3.put_object(
                Bucket=self.store.bucket, Key=self.store.key(plan), Body=json.dumps(facts).encode()
            )
            job = self.batch.submit_job(**names, **array, containerOverrides=overrides)["jobId"]
        except Exception as error:
            raise SystemExit(f"AWS Batch does not take the job: {one_line(error)}") from None
        for index, run in enumerate(runs):
            self.jobs[run] = run.job = f"{job}:{index}" if array else job
        self.journal.write(
            *({"run": run.name, "event": "submitted", "job": run.job} for run in runs)
        )

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
            ended = {
                run for run, job in self.jobs.items() if states.get(job, ("FAILED",))[0] in ENDED
            }
            for run in self.jobs:
                if run in ended or states[run.job][0] == "RUNNING":
                    self.store.fetch(f"logs/{run.log.name}", run.log)
            for run in ended:
                if task.exit_code(run.log) == 0:
                    self.store.fetch_folder(folder_name(run.log) or "none")
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
                run.job, code = None, task.exit_code(run.log)
                told = f"AWS Batch: {status} {why}".strip() + f" (job {job})"
                yield (
                    run,
                    *(
                        (1, told)
                        if code is None
                        else (code, f"{task.reason(run.log, code)} ({told})" if code else "")
                    ),
                )

    def stop(self, in_a_hurry=lambda: False):
        for job in {job.split(":")[0] for job in self.jobs.values()}:  # an array as a whole
            self.batch.terminate_job(jobId=job, reason="cleanrl_utils.benchmark was stopped")
        for _ in range(60):
            if in_a_hurry() or all(status in ENDED for status, _ in self.states().values()):
                return
            time.sleep(1)


def main(address):
    """In the container: one run, from its log on S3 to its log on S3."""
    bucket, _, key = address.removeprefix("s3://").partition("/")
    prefix, _, name = key.rpartition("plans/")
    store = Store(f"s3://{bucket}/{prefix}")
    plan = json.loads(store.s3.get_object(Bucket=bucket, Key=key)["Body"].read())
    words, folder = (
        plan["runs"][int(os.environ.get("AWS_BATCH_JOB_ARRAY_INDEX", 0))],
        Path("runs/benchmark"),
    )
    log = folder / f"{task.name_of(words)}.log"
    folder.mkdir(parents=True, exist_ok=True)
    if store.fetch(f"logs/{log.name}", log) and (earlier := folder_name(log)):
        store.fetch_folder(earlier)
        with log.open("a") as file:
            file.write(
                f"\nrun folder: {Path('runs', earlier)}\n"
            )  # here, whatever it was called there
    print(f"{name}: {shlex.join(words)}", flush=True)
    watcher = subprocess.Popen(
        [*task.START, "--lifeline", "--in", folder, *words], stdin=subprocess.PIPE
    )
    for number in (
        signal.SIGTERM,
        signal.SIGINT,
    ):  # AWS takes a machine back: what there is still reaches S3
        signal.signal(number, lambda *_: watcher.terminate())
    while True:
        try:
            code = watcher.wait(timeout=plan["interval"])
        except subprocess.TimeoutExpired:
            code = None
        try:
            store.send_run(log)
        except Exception as error:
            print(f"cannot write to {address}: {one_line(error)}", file=sys.stderr, flush=True)
            if code is not None:
                return code or 1
        if code is not None:
            return code


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(
            "usage: python -m cleanrl_utils.benchmark.aws s3://BUCKET/PREFIX/plans/PLAN.json"
        )
    sys.exit(main(sys.argv[1]))
