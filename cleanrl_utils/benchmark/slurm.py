"""The runs of cleanrl_utils.benchmark as Slurm job arrays, one for each --command.

All nodes must see the folder that the benchmark is started in. The jobs outlive the runner; the
same command finds them again.
"""

import math
import re
import shlex
import shutil
import subprocess
import time
from pathlib import Path

from cleanrl_utils.benchmark import log, task
from cleanrl_utils.benchmark.plan import find_script
from cleanrl_utils.errors import explain

TEMPLATE = """#!/bin/bash
#SBATCH --job-name={{exp_name}}
#SBATCH --array={{array}}
#SBATCH --ntasks={{ntasks}}
#SBATCH --cpus-per-task={{cpus_per_task}}
#SBATCH --output={{output}}
{{gpus}}
{{nodes}}

env_ids={{env_ids}}
seeds={{seeds}}
env_id=${env_ids[$((SLURM_ARRAY_TASK_ID / {{len_seeds}}))]}
seed=${seeds[$((SLURM_ARRAY_TASK_ID % {{len_seeds}}))]}

srun {{command}} ${env_id:+--env-id "$env_id"} --seed "$seed"
"""
RUNNING = {"RUNNING", "COMPLETING", "SIGNALING", "STAGE_OUT", "STOPPED"}
ENDED = {
    "COMPLETED",
    "FAILED",
    "CANCELLED",
    "TIMEOUT",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "PREEMPTED",
    "BOOT_FAIL",
    "DEADLINE",
}
ORDINARY = {"None", "Priority", "Resources", "JobArrayTaskLimit"}  # reasons to wait


def ask(*words, env=None):
    """What a command of Slurm prints; (False, its error message) if it fails."""
    done = subprocess.run([*map(str, words)], capture_output=True, text=True, env=env)
    if done.returncode == 0:
        return True, done.stdout
    return False, (done.stderr.strip().splitlines() or ["no answer"])[-1]


class Slurm:
    def __init__(self, args, environment, journal):
        if not shutil.which("sbatch"):
            needs = "--backend slurm needs a machine that can submit jobs to Slurm"
            raise SystemExit(f"there is no sbatch here: {needs}")
        self.args, self.environment, self.journal = args, environment, journal
        self.pause, self.jobs, self.began = args.slurm_poll_interval, {}, set()
        path = args.slurm_template_path
        with explain("read --slurm-template-path"):
            self.template = path.read_text() if path else TEMPLATE
        is_good, states = self.states()
        if not is_good:
            raise SystemExit(f"Slurm does not answer: {states}")

    def states(self):
        """{job: state} of all jobs that Slurm lists, and why they wait."""
        asking = ["--me", "--noheader", "--array", "--states=all", "--format=%i %T %r"]
        is_good, answer = ask("squeue", *asking)
        lines = [line.split(maxsplit=2) for line in answer.splitlines()] if is_good else []
        self.reasons = {job: reason for job, _, reason in lines}
        return is_good, {job: state for job, state, _ in lines} if is_good else answer

    def index(self, run):
        """The index of a run in its array, from which templates compute environment and seed."""
        env_ids = self.args.env_ids or (None,)
        return env_ids.index(run.env_id) * self.args.num_seeds + run.seed - self.args.start_seed

    def script(self, command, indices):
        args = self.args
        seeds = range(args.start_seed, args.start_seed + args.num_seeds)
        gpus = args.slurm_gpus_per_task
        whole = indices == list(range(indices[0], indices[-1] + 1))
        array = f"{indices[0]}-{indices[-1]}" if whole else ",".join(map(str, indices))
        words = shlex.split(command)
        fields = {
            "array": f"{array}%{args.workers}",
            "command": shlex.join([*task.START, "--in", str(args.folder), *words]),
            "cpus_per_gpu": math.ceil(args.slurm_total_cpus / max(1, gpus * args.slurm_ntasks)),
            "cpus_per_task": math.ceil(args.slurm_total_cpus / args.slurm_ntasks),
            "env_ids": f"({shlex.join(args.env_ids)})",
            "exp_name": Path(find_script(words) or "cleanrl").stem,
            "gpus": f"#SBATCH --gpus-per-task={gpus}" if gpus else "",
            "gpus_per_task": gpus,
            "len_seeds": args.num_seeds,
            "nodes": f"#SBATCH --nodes={args.slurm_nodes}" if args.slurm_nodes is not None else "",
            "ntasks": args.slurm_ntasks,
            "output": args.folder / "slurm-%A_%a.out",
            "seeds": f"({' '.join(map(str, seeds))})",
        }
        if unknown := set(re.findall(r"{{(\w+)}}", self.template)) - set(fields):
            names = ", ".join(sorted(unknown))
            raise SystemExit(f"{args.slurm_template_path} has unknown fields: {names}")
        return re.sub(r"{{(\w+)}}", lambda field: str(fields[field[1]]), self.template)

    def submit(self, runs):
        self.jobs |= {run: run.job for run in runs if run.job}  # submitted by an earlier runner
        for command in dict.fromkeys(run.command for run in runs):
            mine = [run for run in runs if run.command == command and run not in self.jobs]
            to_send = {self.index(run): run for run in mine}
            if not to_send:
                continue
            path = self.args.folder / f"slurm-{time.time_ns()}.sh"
            path.write_text(self.script(command, sorted(to_send)))
            is_good, job = ask("sbatch", "--parsable", path, env=self.environment)
            if not is_good:
                raise SystemExit(f"Slurm rejected the job: {job} ({path})")
            for index, run in to_send.items():
                self.jobs[run] = run.job = f"{job.strip().split(';')[0]}_{index}"
            events = [{"run": run.name, "event": "submitted", "job": run.job} for run in mine]
            self.journal.write(*events)

    def poll(self):
        is_good, states = self.states()
        if not is_good:  # it may be restarting: the runs do not suffer from that
            return
        for run, job in list(self.jobs.items()):
            state = states.get(job)  # None: it ended so long ago that Slurm no longer lists it
            if state == "PENDING":
                reason = self.reasons[job]
                run.why = "" if reason in ORDINARY else f"Slurm: it waits for {reason}"
            if state in RUNNING | ENDED | {None} and run not in self.began:
                self.began.add(run)
                yield run, None, ""
            if state in ENDED | {None}:
                del self.jobs[run]
                self.began.discard(run)
                code, why = self.outcome(run, state)
                run.job = None
                yield run, code, why

    def outcome(self, run, state):
        code = log.exit_code(run.log)
        if state == "COMPLETED" or (state is None and code == 0):
            return code or 0, "" if not code else log.reason(run.log, code, run.words)
        told = f"Slurm: {state or 'it is gone, and left no exit code'}, job {run.job}"
        if not code:
            return 1, told
        if state in ("FAILED", None) and code < 128:  # it ended by itself
            return code, ""
        return code, f"{log.reason(run.log, code, run.words)} ({told})"

    def stop(self, in_a_hurry):
        if self.jobs:
            ask("scancel", *self.jobs.values())
        for _ in range(60):
            is_good, states = self.states()
            left = [job for job in self.jobs.values() if states.get(job) not in ENDED | {None}]
            if in_a_hurry() or (is_good and not left):
                return
            time.sleep(1)
