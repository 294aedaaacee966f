"""Print the commands that reproduce a run: its commit, its package versions, its exact flags.

    python -m cleanrl_utils.reproduce runs/<run>
    python -m cleanrl_utils.reproduce runs/<run> | bash -e

Nothing is executed here. The run folder may be a stranger's: what it says is validated and quoted
before it is printed.
"""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

import tyro

from cleanrl_utils import runs
from cleanrl_utils.runs import printable, to_words
from cleanrl_utils.runs import require as check

ENVIRONMENT = ".venv-reproduce"
ROOT = Path(__file__).resolve().parent.parent


@dataclass
class Args:
    run_folder: tyro.conf.Positional[Path]  # folder of the run


def commands(run_folder):
    """The lines to print: a shell script."""
    about = runs.read_run(run_folder)
    file, args = about["file"], about["args"]
    commit, python = about.get("commit", ""), about["python"]
    check(re.fullmatch(r"\w[\w.-]*\.py", file, re.A), "file is not the name of an algorithm file")
    check(
        re.fullmatch(r"([0-9a-f]{40}([0-9a-f]{24})?)?", commit),
        "commit is not the name of a commit",
    )
    check(re.fullmatch(r"\d+\.\d+\.[0-9a-z+]+", python, re.A), "python is not a version")
    processes = int(about.get("world_size", 1))
    check(0 < processes < 2**16, "world_size is not a number of processes")
    program = "python" if processes == 1 else f"torchrun --nproc-per-node {processes}"
    words = [word for name, value in args.items() for word in to_words(name, value)]
    tags = ",".join(printable(tag, "a tag") for tag in about.get("tags", []))
    versions = [
        f"{name}=={version.split('+')[0]}"  # PyPI has no local versions such as 2.13.0+cpu
        for name, version in sorted(about["packages"].items())
        if re.fullmatch(r"\w([\w.-]*\w)?", name, re.A)
        and re.fullmatch(r"\d[\w.!+-]*", str(version), re.A)
    ]

    device = printable(about.get("device", "an unknown device"), "device")
    env_id = printable(str(args["env_id"]), "env_id")
    yield f"# {env_id} with {file}, seed {int(args['seed'])}, on {device}"
    if not (ROOT / "cleanrl" / file).is_file():
        yield f"# there is no cleanrl/{file} in this checkout: the commit must have it, or you"
    if ":" in str(args["env_id"]):
        yield (
            "# beware: the part of the environment's id before the colon "
            "is a module that the run imports"
        )
    if commit:
        yield f"git checkout --detach {commit}"
        if about.get("dirty"):
            yield f"# beware: {file} may differ from that commit: the run kept a copy in its folder"
    else:
        yield "# the run was not made in a git checkout, so that its code is not known"
    yield f"uv venv --python {python} {ENVIRONMENT}"
    if left_out := len(about["packages"]) - len(versions):
        yield f"# without {left_out} that have no proper name or version"
    yield from (f"cat > {ENVIRONMENT}/versions.txt << 'EOF'", *versions, "EOF")
    # constraints install nothing that the file does not ask for
    constraints = f"--constraints {ENVIRONMENT}/versions.txt"
    yield f"uv pip install --python {ENVIRONMENT} {constraints} --requirements cleanrl/{file}"
    variables = f"WANDB_TAGS={shlex.quote(tags)} " if tags else ""
    yield f"{variables}{ENVIRONMENT}/bin/{program} {shlex.join([f'cleanrl/{file}', *words])}"


def main():
    args = tyro.cli(Args)
    with runs.explain(args.run_folder):
        script = list(commands(args.run_folder))  # all of it, or nothing
    print("\n".join(script))


if __name__ == "__main__":
    main()
