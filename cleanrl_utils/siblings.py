"""Keep the algorithm files in step.

    python -m cleanrl_utils.siblings                  # where do files of one family differ?
    python -m cleanrl_utils.siblings ppo ppo_atari    # only these
    python -m cleanrl_utils.siblings --fix            # copy the shared block to every file
    python -m cleanrl_utils.siblings --fix my_ppo.py  # to a file of your own

Every file has a block that is the same text in all PyTorch files, and one that is the same in all
JAX files; ppo.py and dqn_jax.py are the references. Beyond it, a function, class or flag of one
name within a family should be the same, or differ for a reason.
"""

import argparse
import ast
import difflib
import os
import re
import sys
from itertools import combinations
from pathlib import Path

from cleanrl_utils.errors import explain

FOLDER = Path(__file__).resolve().parent.parent / "cleanrl"
START = re.compile(r"^# -- the same in every (PyTorch|JAX) file.*$", re.MULTILINE)
END = re.compile(r"^# -- the algorithm -+$", re.MULTILINE)
REFERENCES = {"PyTorch": "ppo", "JAX": "dqn_jax"}
FAMILIES = {
    "PPO, vector observations": [
        "ppo",
        "ppo_multidiscrete",
        "ppo_continuous_action",
        "rpo_continuous_action",
        "ppo_continuous_lstm",
        "ppo_trxl",
        "ppo_dict",
    ],
    "PPO, Atari": [
        "ppo_atari",
        "ppo_atari_lstm",
        "ppo_atari_envpool",
        "ppo_atari_multigpu",
        "ppo_pettingzoo_ma_atari",
        "ppo_rnd_envpool",
    ],
    "PPO, Procgen": ["ppo_procgen", "ppg_procgen"],
    "PPO, JAX": ["ppo_jax", "ppo_rnn_jax", "ppo_jaxtari_jax", "ppo_continuous_action_jax"],
    "PPO for teams, JAX": ["ppo_jax", "ippo_jax", "mappo_rnn_jax"],
    "PPO, EnvPool and XLA": ["ppo_atari_envpool_xla_jax", "ppo_atari_envpool_xla_jax_scan"],
    "PQN": ["ppo", "pqn"],
    "PQN, Atari": ["ppo_atari_envpool", "pqn_atari_envpool", "pqn_atari_envpool_lstm"],
    "PQN, JAX": ["ppo_jax", "pqn_jax"],
    "Value learning": ["dqn", "c51", "qrdqn"],
    "Value learning, Atari": [
        "dqn_atari",
        "c51_atari",
        "rainbow_atari",
        "sac_atari",
        "qdagger_dqn_atari",
    ],
    "Value learning, JAX": ["dqn_jax", "c51_jax"],
    "Value learning, Atari, JAX": ["dqn_atari_jax", "c51_atari_jax", "qdagger_dqn_atari_jax"],
    "Continuous control": [
        "ddpg_continuous_action",
        "td3_continuous_action",
        "sac_continuous_action",
    ],
    "Continuous control, JAX": [
        *(f"{x}_continuous_action_jax" for x in ("ddpg", "td3", "sac", "tqc", "droq", "crossq")),
        "simba_v2_sac_jax",
    ],
    "Robots, JAX": ["ppo_continuous_action_jax", "fast_td3_jax", "fast_sac_jax"],
    "TD3, JAX": ["td3_continuous_action_jax", "fast_td3_jax"],
    "SAC, JAX": ["sac_continuous_action_jax", "fast_sac_jax"],
}


def split(source, name):
    """A file's text before, in and after the shared block, and the block's kind."""
    start, end = START.search(source), END.search(source)
    if not start or not end or end.start() < start.start():
        raise SystemExit(
            f"{name} has no block between '# -- the same in every' and '# -- the algo'"
        )
    parts = source[: start.start()], source[start.start() : end.start()], source[end.start() :]
    return parts, start.group(1)


def reference_block(kind):
    path = FOLDER / f"{REFERENCES[kind]}.py"
    return split(path.read_text(), path.name)[0][1]


def block_difference(path):
    """How the shared block of a file differs from its reference's, as the lines of a diff."""
    (_, block, _), kind = split(path.read_text(), path.name)
    names = f"{REFERENCES[kind]}.py", path.name
    lines = reference_block(kind).splitlines(), block.splitlines()
    return list(difflib.unified_diff(*lines, *names, lineterm="", n=1))


def fix(path):
    """Copy the reference's block into a file; returns whether that changed it."""
    source = path.read_text()
    (before, block, after), kind = split(source, path.name)
    if block == reference_block(kind):
        return False
    path.write_text(before + reference_block(kind) + after)
    return True


def named_parts(path):
    """The text of every function, class and flag outside the shared block, by its name."""
    source = path.read_text().replace(path.name, "FILE.py")
    (before, block, _), _ = split(source, path.name)
    first = before.count("\n") + 1
    shared = range(first, first + block.count("\n"))
    lines, parts = source.splitlines(), {}
    with explain(f"read {path.name}"):
        tree = ast.parse(source)
    for node in tree.body:
        if node.lineno in shared:
            continue
        if isinstance(node, ast.ClassDef) and node.name == "Args":
            for flag in node.body:
                if isinstance(flag, ast.AnnAssign):
                    parts[f"Args.{flag.target.id}"] = lines[flag.lineno - 1 : flag.end_lineno]
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            parts[node.name] = lines[node.lineno - 1 : node.end_lineno]
    return parts


def family_differences(paths):
    """(name, path, other path, lines of a diff) of every part that two files both have."""
    parts = {path: named_parts(path) for path in paths}
    for a, b in combinations(paths, 2):
        for name in parts[a].keys() & parts[b].keys():
            texts = parts[a][name], parts[b][name]
            if texts[0] != texts[1]:
                yield name, a, b, difflib.unified_diff(*texts, a.name, b.name, lineterm="", n=0)


def find(name):
    for path in (Path(name), FOLDER / name, FOLDER / f"{name}.py"):
        if path.is_file():
            return path
    raise SystemExit(f"no algorithm file {name}")


def main():
    parser = argparse.ArgumentParser(
        prog="python -m cleanrl_utils.siblings", description=__doc__.splitlines()[0]
    )
    parser.add_argument("files", nargs="*", help="names or paths; all files of cleanrl/ by default")
    parser.add_argument("--fix", action="store_true", help="copy the shared block to these files")
    args = parser.parse_args()
    paths = [find(name) for name in args.files] or sorted(FOLDER.glob("*.py"))
    if args.fix:
        for path in paths:
            if fix(path):
                print(f"{path.name}: shared block copied")
        return
    try:
        found = compare(paths, bool(args.files))
        sys.stdout.flush()
    except BrokenPipeError:  # head or less has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        found = True
    sys.exit(found)


def compare(paths, are_named):
    """Print what differs; returns whether anything does."""
    found = False
    for path in paths:
        if difference := block_difference(path):
            found = True
            print("\n".join([f"## {path.name}: the shared block differs", *difference, ""]))
    for family, names in FAMILIES.items():
        members = [path for path in paths if path.stem in names]
        if are_named:  # they are one family
            family, members = "the files named", paths
        for name, a, b, difference in sorted(
            family_differences(members), key=lambda found: (found[0], found[1], found[2])
        ):
            print("\n".join([f"## {name} ({family}: {a.stem}, {b.stem})", *difference, ""]))
        if are_named:
            break
    return found


if __name__ == "__main__":
    main()
