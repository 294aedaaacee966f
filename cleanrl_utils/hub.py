"""Share trained agents on the Hugging Face Hub, and fetch those of others.

    python -m cleanrl_utils.hub push runs/<run> --hf-entity me
    python -m cleanrl_utils.hub pull cleanrl/CartPole-v1-dqn-seed1

push creates the repository {entity}/{env_id}-{exp_name}-seed{seed}: weights (safetensors),
run.json, the file that trained it, curves, a video and a model card. pull makes a run folder from
such a repository or from one of CleanRL v1 (upstream). Nothing that is fetched is ever executed:
the policy comes from our own file in cleanrl/ of the same name.
"""

import importlib.util
import json
import os
import re
import runpy
import shutil
import subprocess
import tempfile
import time
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import numpy as np
import torch
import tyro

from cleanrl_utils import enjoy
from cleanrl_utils.events import read_events

LIMIT = (
    2**28
)  # bytes: larger files are neither pushed nor pulled; our largest weights have a tenth of that
WANTED = re.compile(
    r"README\.md|run\.json|eval\.json|model\.safetensors|curve\.png|replay\.mp4|learning\.mp4|"
    r"events\.out\.tfevents\.[\w.-]+|[\w-]+\.py|[\w-]+\.cleanrl_model"
)

# CleanRL v1 (upstream) models: the part of the checkpoint, and names of layers where they differ.
FROM_MLP = {"network.0": "hidden1", "network.2": "hidden2"}
FROM_CNN = {"network.0": "conv1", "network.2": "conv2", "network.4": "conv3", "network.7": "hidden"}
FROM_ACTOR = {"fc1": "hidden1", "fc2": "hidden2", "fc_mu": "actions"}
PUBLIC_TORCH = {
    "dqn": ("q_network", FROM_MLP | {"network.4": "q_values"}),
    "dqn_atari": ("q_network", FROM_CNN | {"network.9": "q_values"}),
    "c51": ("q_network", FROM_MLP | {"network.4": "logits"}),
    "c51_atari": ("q_network", FROM_CNN | {"network.9": "logits"}),
    "ddpg_continuous_action": ("actor", FROM_ACTOR),
    "td3_continuous_action": ("actor", FROM_ACTOR),
    **dict.fromkeys(("ppo", "ppo_atari", "ppo_atari_envpool", "ppo_atari_lstm"), ("agent", {})),
}
PUBLIC_JAX = {
    **dict.fromkeys(("dqn_jax", "dqn_atari_jax", "c51_jax", "c51_atari_jax"), "params"),
    **dict.fromkeys(("ddpg_continuous_action_jax", "td3_continuous_action_jax"), "actor"),
}
NO_NORMALIZER = ("ppo_continuous_action", "rpo_continuous_action")


@dataclass
class Push:
    """Share a run."""

    run_folder: tyro.conf.Positional[Path]  # folder of the run
    hf_entity: str  # user or organization to share it as; log in with `hf auth login`
    private: bool = False  # only for those who are allowed to see it
    episodes: int = 10  # episodes to evaluate, if the run's last checkpoint was not evaluated yet
    file: Path | None = None  # algorithm file of the run, if not the one in cleanrl/ of that name
    env_id: str | None = None  # its environment, if that is one that has to be imported


@dataclass
class Pull:
    """Fetch a model into a run's folder, for cleanrl_utils.enjoy."""

    repository: tyro.conf.Positional[str]  # entity/repository, or hf://entity/repository
    into: Path = Path("runs")  # where to make the folder


def repo_name(env_id, exp_name, seed):
    """The name that the public project gives, in the letters that the Hub takes."""
    name = re.sub(r"[^A-Za-z0-9._-]", "-", f"{env_id}-{exp_name}-seed{seed}")
    return re.sub(r"([.-])[.-]+", r"\1", name).strip(".-")


def need_extra():
    missing = [
        name
        for name in ("huggingface_hub", "matplotlib", "safetensors")
        if importlib.util.find_spec(name) is None
    ]
    if missing:
        raise SystemExit(
            f"{', '.join(missing)} is not installed: install the extra hub of pyproject.toml"
        )


def one_line(what, error):
    """The exit with what went wrong, from errors that go on for pages."""
    from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError

    status = getattr(getattr(error, "response", None), "status_code", None)
    if status in (401, 403) and not isinstance(error, RepositoryNotFoundError):
        why = (
            "the Hub says that you may not: "
            "log in with `hf auth login`, with a token that can write"
        )
    elif isinstance(error, RepositoryNotFoundError):
        why = (
            "the Hub has no such repository, "
            "or shows it only to those who log in with `hf auth login`"
        )
    elif isinstance(error, HfHubHTTPError):
        why = f"the Hub answered {status}: {error.server_message or error}"
    else:
        why = f"{type(error).__name__}: {error}"
    return SystemExit(f"cannot {what}: {why}".splitlines()[0])


def flatten(checkpoint, prefix=""):
    """The arrays of a checkpoint under flat names, such as agent/actor.0.weight."""
    for name, part in checkpoint.items():
        if isinstance(part, dict):
            yield from flatten(part, f"{prefix}{name}/")
        else:
            yield f"{prefix}{name}", part


def save_weights(checkpoint, path):
    from safetensors.numpy import save_file

    parts = dict(flatten(checkpoint))
    framework = "pt" if any(isinstance(part, torch.Tensor) for part in parts.values()) else "np"
    save_file(
        {name: np.require(np.asarray(part), requirements="C") for name, part in parts.items()},
        path,
        {"format": framework},
    )


def training_returns(run_folder):
    """Steps and returns of the training's episodes; what is wrong with its event files is said."""
    scalars, problems = read_events(run_folder)
    for problem in problems:
        print(problem)
    rows = scalars.get("charts/episodic_return", np.zeros((0, 3)))
    return rows[:, 0], rows[:, 1]


def draw_curve(steps, returns, title, path):
    from matplotlib.figure import Figure  # without pyplot there is no window to be closed

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(steps, returns, ".", markersize=2, alpha=0.3, color="tab:blue", label="each episode")
    ends, sums = np.arange(1, len(returns) + 1), np.cumsum([0, *returns])
    starts = np.maximum(0, ends - 100)
    axes.plot(
        steps,
        (sums[ends] - sums[starts]) / (ends - starts),
        color="tab:blue",
        label="mean of the last 100",
    )
    axes.set(xlabel="environment steps", ylabel="episodic return", title=title)
    axes.legend(loc="best")
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)


def trained_by(file, about, run_folder=None):
    """The source of the file that trained a run, and how sure that is."""
    copy = run_folder and run_folder / about["file"]
    if copy and copy.is_file():
        content = copy.read_bytes()
        if sha256(content).hexdigest() == about.get("sha256"):
            return content.decode(), "from the copy that the run kept"
    text, commit = file.read_text(), str(about.get("commit", ""))
    if file.stat().st_mtime < about.get("start_time", 0):
        return text, "unchanged since the run began"
    if re.fullmatch("[0-9a-f]{40}", commit):
        show = ["git", "show", f"{commit}:./{file.name}"]
        done = subprocess.run(show, cwd=file.parent, capture_output=True, text=True)
        if done.returncode == 0:
            return done.stdout, f"as it was in the commit {commit[:8]} that the run began with"
    return text, "as it is now: it was changed after the run began"


def command_of(file_name, args, defaults):
    """The command that starts the run again: the flags that are not the file's own."""
    words = ["python", f"cleanrl/{file_name}"]
    for name, value in args.items():
        if (
            name in ("exp_name", "resume")
            or (name in vars(defaults) and vars(defaults)[name] == value)
            or value is None
        ):
            continue
        flag = name.replace("_", "-")
        words += (
            [f"--{'' if value else 'no-'}{flag}"]
            if isinstance(value, bool)
            else [f"--{flag}", str(value)]
        )
    return " ".join(words)


def write_card(folder, repo_id, about, evaluation, returns, source_note, defaults):
    """README.md: what the Hub shows of a model, with the results in a form that it can read."""
    from huggingface_hub import EvalResult, ModelCardData

    args, file_name = about["args"], about["file"]
    env_id, exp_name = args["env_id"], args["exp_name"]
    result = f"{evaluation['mean']:.2f} +/- {evaluation['std']:.2f}"
    task = dict(task_type="reinforcement-learning", task_name="reinforcement-learning")
    of = dict(
        dataset_type=env_id,
        dataset_name=env_id,
        metric_type="mean_reward",
        metric_name="mean_reward",
    )
    tags = [
        env_id,
        "deep-reinforcement-learning",
        "reinforcement-learning",
        "custom-implementation",
        "cleanrl",
    ]
    data = ModelCardData(
        library_name="cleanrl",
        tags=tags,
        model_name=exp_name,
        eval_results=[EvalResult(**task, **of, metric_value=result)],
    )
    epsilon = (
        f", a random action with chance {evaluation['epsilon']}"
        if evaluation.get("epsilon")
        else ""
    )
    last = (
        f"{returns[-100:].mean():.2f} ± {returns[-100:].std():.2f}"
        if len(returns)
        else "not logged"
    )
    header = (
        (folder / file_name).read_text().partition("\n# ///\n")[0]
    )  # names the packages that the file needs
    packages = {
        name: v
        for name, v in about.get("packages", {}).items()
        if re.search(rf'"{re.escape(name)}[\[>]', header)
    }
    versions = {"python": about.get("python"), **packages}
    there = {path.name for path in folder.iterdir()}
    lines = [
        f"---\n{data.to_yaml()}\n---\n",
        f"# {exp_name} on {env_id}\n",
        f"An agent trained by CleanRL's `{file_name}` with seed {args['seed']}, "
        f"at step {evaluation['global_step']:,}.\n",
        "| return | mean ± standard deviation |\n|---|---|",
        f"| {len(evaluation['returns'])} evaluation episodes, seed {evaluation['seed']}{epsilon} | "
        f"{evaluation['mean']:.2f} ± {evaluation['std']:.2f} |",
        f"| last {min(100, len(returns))} training episodes | {last} |\n",
        *(["![return of each training episode](curve.png)\n"] if "curve.png" in there else []),
        *(
            ["One of these episodes: [replay.mp4](replay.mp4).\n"]
            if "replay.mp4" in there
            else ["There is no video.\n"]
        ),
        *(
            ["How the agent learned: [learning.mp4](learning.mp4).\n"]
            if "learning.mp4" in there
            else []
        ),
        "## Use\n",
        f"```bash\npython -m cleanrl_utils.enjoy hf://{repo_id}\n```\n",
        "The weights are `model.safetensors`; "
        "`load_policy` in CleanRL's file of the same name makes a policy of them.\n",
        "## Training\n",
        f"```bash\n{command_of(file_name, args, defaults)}\n```\n",
        f"`{file_name}` is the file that did it, {source_note}. "
        "`run.json` has all settings and versions.\n",
        "| setting | value |\n|---|---|",
        *(f"| `{name}` | `{value}` |" for name, value in args.items()),
        "",
        "| on | version |\n|---|---|",
        *(f"| {name} | {version} |" for name, version in versions.items()),
        f"| device | {about.get('device')} |",
        f"| commit | {about.get('commit') or 'none'} |\n",
    ]
    (folder / "README.md").write_text("\n".join(lines), encoding="utf-8")


def push(run_folder, hf_entity, private=False, episodes=10, file=None, env_id=None):
    """Share a run; returns the address. The repository changes in one commit, or not at all."""
    need_extra()
    from huggingface_hub import HfApi
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()
    file_name, args = enjoy.read_run(run_folder)
    about = json.loads((run_folder / "run.json").read_text()) | {
        "file": Path(file_name).name,
        "args": args,
    }
    file = file or enjoy.ALGORITHMS / about["file"]
    if not file.is_file():
        raise SystemExit(f"there is no {file}: say with --file which algorithm file made this run")
    if missing := {"env_id", "exp_name", "seed"} - args.keys():
        names = ", ".join(sorted(missing))
        raise SystemExit(f"{run_folder} is not the folder of a run: run.json does not tell {names}")
    repo_id = f"{hf_entity}/{repo_name(args['env_id'], args['exp_name'], args['seed'])}"
    checkpoint_path = enjoy.find_checkpoint(run_folder)
    with tempfile.TemporaryDirectory() as staging:
        folder = Path(staging)
        weights = enjoy.learned(enjoy.load_checkpoint(run_folder))
        save_weights(weights, folder / "model.safetensors")
        weights = enjoy.load_checkpoint(
            folder / "model.safetensors"
        )  # what is evaluated is what others will load
        evaluation = last_evaluation(run_folder, checkpoint_path, weights)
        if evaluation is None:
            try:
                evaluation = enjoy.evaluate(
                    run_folder, weights, episodes, num_videos=1, file=file, env_id=env_id
                )
            except SystemExit as problem:
                if "does not render" not in str(problem):
                    raise
                evaluation = enjoy.evaluate(run_folder, weights, episodes, file=file, env_id=env_id)
        shutil.copy(run_folder / "run.json", folder)
        shutil.copy(run_folder / "eval.json", folder)
        source, source_note = trained_by(file, about, run_folder)
        (folder / about["file"]).write_text(source)
        steps, returns = training_returns(run_folder)
        if len(returns):
            draw_curve(
                steps,
                returns,
                f"{args['exp_name']} on {args['env_id']}, seed {args['seed']}",
                folder / "curve.png",
            )
        for i, events in enumerate(sorted(run_folder.glob("events.out.tfevents.*"))):
            shutil.copy(
                events, folder / f"events.out.tfevents.{i:04}"
            )  # without the name of the machine
        if replay := newest_replay(run_folder):
            shutil.copy(replay, folder / "replay.mp4")
        if (run_folder / "videos" / "learning.mp4").exists():
            shutil.copy(run_folder / "videos" / "learning.mp4", folder)
        write_card(
            folder,
            repo_id,
            about,
            evaluation,
            returns,
            source_note,
            runpy.run_path(str(file))["Args"](),
        )
        for path in [path for path in folder.iterdir() if path.stat().st_size > LIMIT]:
            if path.name == "model.safetensors":
                raise SystemExit(
                    f"cannot push {run_folder}: its weights have more than {LIMIT >> 20} MiB"
                )
            print(f"left out, since it has more than {LIMIT >> 20} MiB: {path.name}")
            path.unlink()
        size, count = (
            sum(path.stat().st_size for path in folder.iterdir()),
            len(list(folder.iterdir())),
        )
        try:
            api = HfApi()
            url = api.create_repo(repo_id, private=private, exist_ok=True)
            old = [
                "events.out.tfevents.*",
                "*.mp4",
                "*.png",
                "*.cleanrl_model",
            ]  # of an earlier push, if not of this one
            api.upload_folder(
                repo_id=repo_id,
                folder_path=folder,
                delete_patterns=old,
                commit_message=f"Step {evaluation['global_step']:,}",
            )
        except Exception as error:
            raise one_line(f"push to {repo_id}", error) from None
    print(f"pushed {count} files, {size / 2**20:.1f} MiB: {url}")
    return str(url)


def newest_replay(run_folder):
    return max(
        run_folder.glob("videos/eval-*-episode-0.mp4"),
        key=lambda path: path.stat().st_mtime,
        default=None,
    )


def last_evaluation(run_folder, checkpoint_path, weights):
    """eval.json, if it is of the last checkpoint and comes with a video."""
    replay = newest_replay(run_folder)
    if (
        replay is None
        or replay.stat().st_mtime < checkpoint_path.stat().st_mtime
        or not (run_folder / "eval.json").exists()
    ):
        return None
    try:
        evaluation = json.loads((run_folder / "eval.json").read_text())
        return (
            evaluation if evaluation["global_step"] == int(weights.get("global_step", 0)) else None
        )
    except (ValueError, KeyError):
        return None


def check_names_and_sizes(repo_id, files):
    """The files to fetch; a repository without ours, or with hostile names, is refused whole."""
    for name in files:
        if (
            name.startswith(("/", "~"))
            or {".", ".."} & {*name.split("/")}
            or "\\" in name
            or not name.isprintable()
        ):
            raise SystemExit(f"refused {repo_id}: it has a file named {name!r}")
    wanted = {name: size for name, size in files.items() if WANTED.fullmatch(name)}
    for name, size in wanted.items():
        if size is None or size > LIMIT:
            raise SystemExit(
                f"refused {repo_id}: {name} has {size or 'unknown'} bytes, "
                f"more than {LIMIT >> 20} MiB"
            )
    if sum(wanted.values()) > 2 * LIMIT or len(wanted) > 100:
        size = sum(wanted.values()) >> 20
        raise SystemExit(f"refused {repo_id}: {len(wanted)} files of {size} MiB are too many")
    if not {"run.json", "model.safetensors"} <= wanted.keys() and not any(
        name.endswith(".cleanrl_model") for name in wanted
    ):
        raise SystemExit(
            f"refused {repo_id}: "
            "it has neither run.json with model.safetensors nor a .cleanrl_model"
        )
    return list(wanted)


def pull(repository, into=Path("runs")):
    """The folder of a run, made from a repository on the Hub: all of it, or none."""
    need_extra()
    from huggingface_hub import HfApi, hf_hub_download
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()
    repo_id = str(repository).removeprefix("hf://").rstrip("/")
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repo_id):
        raise SystemExit(
            f"{repository} is not the name of a repository: it should be entity/repository"
        )
    try:
        info = HfApi().model_info(repo_id, files_metadata=True)
    except Exception as error:
        raise one_line(f"find {repo_id}", error) from None
    if not re.fullmatch("[0-9a-f]{40}", str(info.sha)):
        raise SystemExit(f"refused {repo_id}: it has no commit")
    run_folder = into / f"{repo_id.replace('/', '__')}__{info.sha[:8]}"
    if run_folder.exists():  # of the same commit, so it is the same
        print(f"run folder: {run_folder}")
        return run_folder
    wanted = check_names_and_sizes(repo_id, {file.rfilename: file.size for file in info.siblings})
    into.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=".pull-", dir=into))
    try:
        for name in wanted:
            try:
                fetched = hf_hub_download(repo_id, name, revision=info.sha)
            except Exception as error:
                raise one_line(f"fetch {name} of {repo_id}", error) from None
            if os.path.getsize(fetched) > LIMIT:
                raise SystemExit(f"refused {repo_id}: {name} has more than {LIMIT >> 20} MiB")
            shutil.copyfile(
                fetched, folder / (f"{name}.txt" if name.endswith(".py") else name)
            )  # text that is never run
        if not {"run.json", "model.safetensors"} <= set(wanted):
            read_public(repo_id, folder)
        enjoy.read_run(folder)
        enjoy.load_checkpoint(folder / "model.safetensors")
        folder.chmod(0o755)
        os.rename(folder, run_folder)
    except SystemExit as problem:
        raise SystemExit(str(problem).replace(str(folder), repo_id)) from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(f"run folder: {run_folder}")
    return run_folder


def read_public(repo_id, folder):
    """Convert a CleanRL v1 (upstream) model: run.json from its names, weights under our names."""
    (path, *others) = sorted(folder.glob("*.cleanrl_model"))
    name, exp_name = repo_id.split("/")[1], path.stem
    found = re.fullmatch(rf"(.+)-{re.escape(exp_name)}-seed(\d+)", name)
    if others or not found:
        raise SystemExit(
            f"cannot tell what {repo_id} is: "
            f"it should be called ENV_ID-{exp_name}-seedN and have one .cleanrl_model"
        )
    if exp_name in NO_NORMALIZER:
        raise SystemExit(
            f"cannot play {repo_id}: "
            f"models of the public {exp_name}.py come without their observation normalizer"
        )
    if exp_name not in PUBLIC_TORCH and exp_name not in PUBLIC_JAX:
        raise SystemExit(
            f"cannot play {repo_id}: no file of ours has the networks of the public {exp_name}.py"
        )
    try:
        checkpoint = (public_torch if exp_name in PUBLIC_TORCH else public_jax)(exp_name, path)
        size = sum(
            part.nbytes for _, part in flatten(checkpoint)
        )  # a small file can stand for large tensors
        assert size <= LIMIT, f"weights of {size} bytes"
        save_weights(checkpoint, folder / "model.safetensors")
    except Exception as error:
        raise SystemExit(
            f"refused {repo_id}: {path.name}: {type(error).__name__}: {error}".splitlines()[0]
        ) from None
    path.unlink()
    args = {"exp_name": exp_name, "env_id": found[1], "seed": int(found[2])}
    about = {
        "file": f"{exp_name}.py",
        "args": args,
        "start_time": time.time(),
        "source": f"hf://{repo_id}",
    }
    (folder / "run.json").write_text(json.dumps(about, indent=2))


def public_torch(exp_name, path):
    weights = torch.load(path, map_location="cpu", weights_only=True)
    weights = weights["model_weights"] if exp_name.startswith("c51") else weights
    part, names = PUBLIC_TORCH[exp_name]
    if part == "actor":  # beside its critics
        weights = {
            name: x for name, x in weights[0].items() if name not in ("action_scale", "action_bias")
        }
    renamed = {}
    for name, x in weights.items():
        layer, _, kind = name.rpartition(".")
        renamed[f"{names.get(layer, layer)}.{kind}" if layer else name] = x
    return {part: renamed}


def public_jax(exp_name, path):
    from flax.serialization import msgpack_restore

    weights = msgpack_restore(path.read_bytes())
    if PUBLIC_JAX[exp_name] == "actor":  # beside its critics
        params = weights["0"]["params"]
        return {
            "agent": {"actor": {"params": {f"Dense_{i}": params[f"Dense_{i}"] for i in range(3)}}}
        }
    if not exp_name.startswith("c51"):
        return {"agent": {"params": weights}}
    v_min, v_max, n_atoms = (weights["args"][name] for name in ("v_min", "v_max", "n_atoms"))
    assert 1 < n_atoms <= 10_000, f"{n_atoms} atoms"
    return {
        "agent": {
            "params": weights["model_weights"],
            "atoms": np.linspace(v_min, v_max, n_atoms, dtype=np.float32),
        }
    }


def main():
    asked = tyro.cli(Push | Pull, description=__doc__)
    (push if isinstance(asked, Push) else pull)(**vars(asked))


if __name__ == "__main__":
    main()
