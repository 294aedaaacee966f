"""Print the commands that reproduce a run: its commit, its package versions, its exact flags.

    python -m cleanrl_utils.reproduce runs/<run>
    python -m cleanrl_utils.reproduce runs/<run> | bash -e

Nothing is executed here, and the commands leave your checkout as it is: commit and environment go
into .reproduce/, the new run into runs/. The run folder may be untrusted: its content is
validated and quoted before it is printed.
"""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

import tyro

from cleanrl_utils import runs
from cleanrl_utils.errors import explain
from cleanrl_utils.runs import require, require_printable, to_words

ROOT = Path(__file__).resolve().parent.parent


@dataclass
class Args:
    run_folder: tyro.conf.Positional[Path]  # folder of the run


def commands(run_folder):
    """The lines to print: a shell script."""
    run = check(runs.read_run(run_folder))
    args, file, commit = run["args"], run["file"], run.get("commit", "")
    versions = pinned(run["packages"])
    folder = f".reproduce/{commit[:12] or 'unknown'}"
    environment, code = f"{folder}/.venv", f"{folder}/code/cleanrl" if commit else "cleanrl"

    yield f"# {args['env_id']} with {file}, seed {args['seed']}, on {run.get('device')}"
    if not (ROOT / "cleanrl" / file).is_file():
        yield f"# this checkout has no cleanrl/{file}: the commit must contain it, or copy it"
    if ":" in str(args["env_id"]):
        module = "the part of the environment's id before the colon is a module"
        yield f"# warning: {module} that the run imports"
    # the first command needs uv: without it, nothing happens
    yield f"uv venv --clear --python {run['python']} {environment}"
    if commit:
        yield f"test -d {folder}/code || git worktree add --detach {folder}/code {commit}"
        if run.get("dirty"):
            yield f"# warning: {file} may differ from that commit: the run folder has a copy"
    else:
        yield "# the run was not made in a git checkout, so that its code is not known"
    if left_out := len(run["packages"]) - len(versions):
        yield f"# left out: packages without a valid name or version: {left_out}"
    yield from (f"cat > {folder}/versions.txt << 'EOF'", *versions, "EOF")
    # constraints install nothing that the file does not ask for
    install = f"--constraints {folder}/versions.txt --requirements {code}/{file}"
    yield f"uv pip install --python {environment} {install}"
    num_processes = int(run.get("world_size", 1))
    program = f"torchrun --nproc-per-node {num_processes}" if num_processes > 1 else "python"
    words = [word for name, value in args.items() for word in to_words(name, value)]
    tags = shlex.quote(",".join(run.get("tags", [])))
    variables = f"WANDB_TAGS={tags} " if run.get("tags") else ""
    yield f"{variables}{environment}/bin/{program} {shlex.join([f'{code}/{file}', *words])}"


def check(run):
    """Refuse what a shell could take for anything but a name, a version or a commit."""
    file, commit, python = run["file"], run.get("commit", ""), run["python"]
    is_file = re.fullmatch(r"\w[\w.-]*\.py", file, re.A)
    require(is_file, "file is not the name of an algorithm file")
    is_commit = re.fullmatch(r"([0-9a-f]{40}([0-9a-f]{24})?)?", commit)
    require(is_commit, "commit is not the name of a commit")
    require(re.fullmatch(r"\d+\.\d+\.[0-9a-z+]+", python, re.A), "python is not a version")
    is_number = 0 < int(run.get("world_size", 1)) < 2**16
    require(is_number, "world_size is not a number of processes")
    for tag in run.get("tags", []):
        require_printable(tag, "a tag")
    require_printable(run.get("device", ""), "device")
    require_printable(str(run["args"]["env_id"]), "env_id")
    int(run["args"]["seed"])
    return run


def pinned(packages):
    """Requirements such as numpy==2.3.4 of what has a proper name and version."""
    lines = []
    for name, version in sorted(packages.items()):
        is_name = re.fullmatch(r"\w([\w.-]*\w)?", name, re.A)
        if is_name and re.fullmatch(r"\d[\w.!+-]*", str(version), re.A):
            # PyPI has no local versions such as 2.13.0+cpu
            lines.append(f"{name}=={version.split('+')[0]}")
    return lines


def main():
    args = tyro.cli(Args, prog="python -m cleanrl_utils.reproduce", description=__doc__)
    with explain(f"read {args.run_folder}/run.json"):
        script = list(commands(args.run_folder))  # all of it, or nothing
    print("\n".join(script))


if __name__ == "__main__":
    main()
