"""Share trained agents on the Hugging Face Hub, and download those of others.

    python -m cleanrl_utils.hub push runs/<run> --hf-entity me
    python -m cleanrl_utils.hub pull cleanrl/CartPole-v1-dqn-seed1

push creates the repository {entity}/{env_id}-{exp_name}-seed{seed}: weights (safetensors),
run.json, the file that trained it, curves, a video and a model card. pull makes a run folder from
such a repository or from one of CleanRL v1 (upstream). Nothing that is fetched is ever executed:
the policy comes from our own file in cleanrl/ of the same name.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import tempfile
import time
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import numpy as np
import torch
import tyro

from cleanrl_utils import enjoy, runs
from cleanrl_utils.errors import explain, need, one_line
from cleanrl_utils.events import read_events
from cleanrl_utils.rlops.scores import running_mean

EXTRA = ("huggingface_hub", "matplotlib", "safetensors")
LIMIT = 2**28  # bytes of a file that is pushed or pulled; our largest weights have a tenth of that
LAST = 100  # episodes of the training that the card has the mean of
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
    private: bool = False  # make the repository private
    episodes: int = 10  # evaluation episodes; an evaluation by enjoy is reused if it has this many
    file: Path | None = None  # algorithm file of the run, if not the one in cleanrl/ of that name
    env_id: str | None = None  # environment of the run, if it needs an import (module:id)


@dataclass
class Pull:
    """Fetch a model into a run's folder, for cleanrl_utils.enjoy."""

    repository: tyro.conf.Positional[str]  # entity/repository, or hf://entity/repository
    into: Path = Path("runs")  # parent of the new run folder


def repo_name(env_id, exp_name, seed):
    """The name that the public project gives, in the letters that the Hub takes."""
    name = re.sub(r"[^A-Za-z0-9._-]", "-", f"{env_id}-{exp_name}-seed{seed}")
    return re.sub(r"([.-])[.-]+", r"\1", name).strip(".-")


@contextmanager
def asking_the_hub(attempt):
    """Report what the Hub answers, or that it cannot be reached, as one line."""
    from huggingface_hub import constants, errors

    login = "log in with `hf auth login`"
    try:
        yield
    except errors.RepositoryNotFoundError:
        reason = f"the Hub has no such repository, or shows it only to those who {login}"
    except errors.HfHubHTTPError as e:
        status = e.response.status_code
        reason = f"the Hub answered {status}: {e.server_message or one_line(e)}"
        if status in (401, 403):
            reason = f"the Hub denied access: {login}, with a token that can write"
    except (errors.HTTPError, errors.OfflineModeIsEnabled, errors.LocalEntryNotFoundError) as e:
        reason = one_line(e)
        if not isinstance(e.__cause__, errors.HfHubHTTPError):  # an answer, if a bad one
            attempt, reason = f"reach {constants.ENDPOINT}", f"{reason} (no network?)"
    except Exception as e:
        reason = one_line(e)
    else:
        return
    raise SystemExit(f"cannot {attempt}: {reason}")


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
    arrays = {name: np.require(np.asarray(x), requirements="C") for name, x in parts.items()}
    save_file(arrays, path, {"format": framework})


def training_episodes(run_folder):
    """Rows (step, return, second, episodes of which it is the mean); what is wrong is said."""
    scalars, problems = read_events(run_folder)
    for problem in problems:
        print(problem)
    rows = scalars.get("charts/episodic_return", np.zeros((0, 3)))
    counts = runs.count_episodes(scalars) if len(rows) else np.zeros(0)
    return np.column_stack([rows, counts])


def draw_curve(rows, title, path):
    from matplotlib.figure import Figure  # without pyplot there is no window to be closed

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    steps, returns = rows[:, 0], rows[:, 1]
    means, _ = running_mean(rows, steps, 0, LAST)
    axes.plot(steps, returns, ".", markersize=2, alpha=0.3, color="tab:blue", label="each episode")
    axes.plot(steps, means, color="tab:blue", label=f"mean of the last {LAST}")
    axes.set(xlabel="environment steps", ylabel="episodic return", title=title)
    axes.legend(loc="best")
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)


def trained_by(file, about, run_folder=None):
    """The source that a run tells the hash of, and where it was found; else the file as it is."""
    for content, found in sources(file, about, run_folder):
        if sha256(content).hexdigest() == about.get("sha256"):
            return content.decode(), f"is the file that trained the agent, {found}"
    return file.read_text(), "is the current version: the source that trained the agent is unknown"


def sources(file, about, run_folder):
    """What may be the source of a run: its own copy, our file, and our file at its commit."""
    names = (about["file"], f"{about['file']}.txt") if run_folder else ()
    for copy in filter(Path.is_file, [run_folder / name for name in names]):
        yield copy.read_bytes(), "from the copy in the run's folder"
    yield file.read_bytes(), "unchanged since the run began"
    commit = str(about.get("commit", ""))
    if re.fullmatch("[0-9a-f]{40}", commit):
        show = ["git", "show", f"{commit}:./{file.name}"]
        done = subprocess.run(show, cwd=file.parent, capture_output=True)
        if done.returncode == 0:
            yield done.stdout, f"as it was in the commit {commit[:8]} that the run began with"


def command_of(file_name, args, defaults):
    """The command that starts the run again: the flags that are not the file's own."""
    words = []
    for name, value in args.items():
        if name != "exp_name" and value != getattr(defaults, name, None):
            words += runs.to_words(name, value)
    return shlex.join(["python", f"cleanrl/{file_name}", *words])


CARD = """\
---
{data}
---

# {exp_name} on {env_id}

An agent trained by CleanRL's `{file}` with seed {seed}, at step {step:,}.

| return | mean ± standard deviation |
|---|---|
| {num_episodes} evaluation episodes, seed {eval_seed}{how} | {mean:.2f} ± {std:.2f} |
| last {num_last} training episodes | {last} |

{media}

## Use

```bash
python -m cleanrl_utils.enjoy hf://{repo_id}
```

The weights are `model.safetensors`;
`load_policy` in CleanRL's file of the same name turns them into a policy.

## Training

```bash
{command}
```

`{file}` {source_note}. `run.json` has all settings and versions.

| setting | value |
|---|---|
{settings}

| on | version |
|---|---|
{versions}
"""


def write_card(folder, repo_id, run, evaluation, rows, source_note, defaults):
    """README.md: what the Hub shows of a model, with the results in a form that it can read."""
    from huggingface_hub import EvalResult, ModelCardData

    args, env_id = run["args"], run["args"]["env_id"]
    result = EvalResult(
        task_type="reinforcement-learning",
        task_name="reinforcement-learning",
        dataset_type=env_id,
        dataset_name=env_id,
        metric_type="mean_reward",
        metric_name="mean_reward",
        metric_value=f"{evaluation['mean']:.2f} +/- {evaluation['std']:.2f}",
    )
    tags = "deep-reinforcement-learning reinforcement-learning custom-implementation cleanrl"
    data = ModelCardData(
        library_name="cleanrl",
        tags=[env_id, *tags.split()],
        model_name=args["exp_name"],
        eval_results=[result],
    )
    how = ", the most likely actions" if evaluation.get("deterministic") else ""
    if evaluation.get("epsilon"):
        how = f", a random action with probability {evaluation['epsilon']}"
    media = {
        "curve.png": "![return of each training episode](curve.png)",
        "replay.mp4": "One of these episodes: [replay.mp4](replay.mp4).",
        "learning.mp4": "How the agent learned: [learning.mp4](learning.mp4).",
    }
    there = [line for name, line in media.items() if (folder / name).exists()]
    if not (folder / "replay.mp4").exists():
        there.append("There is no video.")
    # the packages that the file's header names
    header = (folder / run["file"]).read_text().partition("\n# ///\n")[0]
    versions = {"python": run.get("python")}
    for name, version in run.get("packages", {}).items():
        if re.search(rf'"{re.escape(name)}[\[>]', header):
            versions[name] = version
    versions |= {"device": run.get("device"), "commit": run.get("commit") or "none"}
    of_last, counts = "not logged", runs.episodes_of(rows)
    if len(rows):
        last = rows[-LAST:, 1]
        of_last = f"{runs.mean_of_last(rows[:, 1], counts, LAST):.2f}"
        if (counts == 1).all():  # else it would be the deviation of means
            of_last += f" ± {last.std(ddof=len(last) > 1):.2f}"
    card = CARD.format(
        data=data.to_yaml(),
        exp_name=args["exp_name"],
        env_id=env_id,
        file=run["file"],
        seed=args["seed"],
        step=evaluation["global_step"],
        num_episodes=len(evaluation["returns"]),
        eval_seed=evaluation["seed"],
        how=how,
        mean=evaluation["mean"],
        std=evaluation["std"],
        num_last=min(LAST, round(counts.sum())),
        last=of_last,
        media="\n\n".join(there),
        repo_id=repo_id,
        command=command_of(run["file"], args, defaults),
        source_note=source_note,
        settings="\n".join(f"| `{name}` | `{value}` |" for name, value in args.items()),
        versions="\n".join(f"| {name} | {version} |" for name, version in versions.items()),
    )
    (folder / "README.md").write_text(card, encoding="utf-8")


def push(run_folder, hf_entity, private=False, episodes=10, file=None, env_id=None):
    """Share a run; returns the address. The repository changes in one commit, or not at all."""
    if episodes < 1:
        raise SystemExit(f"--episodes must be at least 1, not {episodes}")
    need(*EXTRA)
    from huggingface_hub import HfApi
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()
    run = enjoy.read_run(run_folder)
    args, run["file"] = run["args"], Path(run["file"]).name
    algorithm = enjoy.import_algorithm(run["file"], file)
    if missing_names := {"env_id", "exp_name", "seed"} - args.keys():
        names = ", ".join(sorted(missing_names))
        raise SystemExit(f"cannot read {run_folder}/run.json: it lacks {names}")
    repo_id = f"{hf_entity}/{repo_name(args['env_id'], args['exp_name'], args['seed'])}"
    with tempfile.TemporaryDirectory() as staging:
        folder = Path(staging)
        weights = enjoy.learned(enjoy.load_checkpoint(run_folder))
        save_weights(weights, folder / "model.safetensors")
        # what is evaluated is what others will load
        weights = enjoy.load_checkpoint(folder / "model.safetensors")
        evaluation = find_evaluation(run_folder, args["env_id"], weights, episodes)
        if evaluation is None:
            evaluation = evaluate(run_folder, weights, episodes, file, env_id)
        with explain(f"push {run_folder}"):
            file = file or enjoy.ALGORITHMS / run["file"]
            fill(folder, run_folder, run, evaluation, file, repo_id, algorithm["Args"]())
        leave_out_large_files(folder, run_folder)
        sizes = [path.stat().st_size for path in folder.iterdir()]
        with asking_the_hub(f"push to {repo_id}"):
            api = HfApi()
            url = api.create_repo(repo_id, private=private, exist_ok=True)
            # of an earlier push, if not of this one
            old = ["events.out.tfevents.*", "*.mp4", "*.png", "*.cleanrl_model"]
            api.upload_folder(
                repo_id=repo_id,
                folder_path=folder,
                delete_patterns=old,
                commit_message=f"Step {evaluation['global_step']:,}",
            )
    print(f"pushed {len(sizes)} files, {sum(sizes) / 2**20:.1f} MiB: {url}")
    return str(url)


def find_evaluation(run_folder, env_id, weights, episodes):
    """enjoy's last one, if it is of this environment, step and number, and has a video."""
    step = int(weights.get("global_step", 0))
    evaluation = runs.read_evaluation(run_folder, env_id, step, episodes)
    with explain(f"read {run_folder}/eval.json"):
        return evaluation if evaluation and replay_of(run_folder, evaluation) else None


def replay_of(run_folder, evaluation):
    """The video of the first evaluation episode, if there is one."""
    for name in evaluation.get("videos", ())[:1]:
        path = run_folder / "videos" / Path(name).name
        return path if path.exists() else None


def evaluate(run_folder, weights, episodes, file, env_id):
    """With a video of the first episode, where the environment can render one."""
    try:
        choices = dict(file=file, env_id=env_id)
        return enjoy.evaluate(run_folder, weights, episodes, num_videos=1, **choices)
    except SystemExit as problem:
        if "does not render" not in str(problem):
            raise
        return enjoy.evaluate(run_folder, weights, episodes, **choices)


def fill(folder, run_folder, run, evaluation, file, repo_id, defaults):
    """Put what is pushed beside the weights."""
    args = run["args"]
    shutil.copy(run_folder / "run.json", folder)
    shutil.copy(run_folder / "eval.json", folder)
    source, source_note = trained_by(file, run, run_folder)
    (folder / run["file"]).write_text(source)
    rows = training_episodes(run_folder)
    if len(rows):
        title = f"{args['exp_name']} on {args['env_id']}, seed {args['seed']}"
        draw_curve(rows, title, folder / "curve.png")
    for i, events in enumerate(sorted(run_folder.glob("events.out.tfevents.*"))):
        shutil.copy(events, folder / f"events.out.tfevents.{i:04}")  # without the machine's name
    if replay := replay_of(run_folder, evaluation):
        shutil.copy(replay, folder / "replay.mp4")
    if (run_folder / "videos" / "learning.mp4").exists():
        shutil.copy(run_folder / "videos" / "learning.mp4", folder)
    write_card(folder, repo_id, run, evaluation, rows, source_note, defaults)


def leave_out_large_files(folder, run_folder):
    limit = f"more than {LIMIT >> 20} MiB"
    for path in [path for path in folder.iterdir() if path.stat().st_size > LIMIT]:
        if path.name == "model.safetensors":
            raise SystemExit(f"cannot push {run_folder}: its weights have {limit}")
        print(f"left out, since it has {limit}: {path.name}")
        path.unlink()


def check_names_and_sizes(repo_id, files):
    """The files to fetch; a repository without ours, or with hostile names, is refused whole."""
    for name in files:
        leads_out = name.startswith(("/", "~")) or {".", ".."} & {*name.split("/")}
        if leads_out or "\\" in name or not name.isprintable():
            raise SystemExit(f"refused {repo_id}: it has a file named {name!r}")
    wanted = {name: size for name, size in files.items() if WANTED.fullmatch(name)}
    for name, size in wanted.items():
        if size is None or size > LIMIT:
            problem = f"{name} has {size or 'unknown'} bytes, more than {LIMIT >> 20} MiB"
            raise SystemExit(f"refused {repo_id}: {problem}")
    if sum(wanted.values()) > 2 * LIMIT or len(wanted) > 100:
        size = sum(wanted.values()) >> 20
        raise SystemExit(f"refused {repo_id}: {len(wanted)} files of {size} MiB are too many")
    is_public = any(name.endswith(".cleanrl_model") for name in wanted)
    if not is_public and not {"run.json", "model.safetensors"} <= wanted.keys():
        needs = "it has neither run.json with model.safetensors nor a .cleanrl_model"
        raise SystemExit(f"refused {repo_id}: {needs}")
    return list(wanted)


def check_run(repo_id, run_folder):
    """Refuse flags that are no plain words on a command line: nothing else reaches a file."""
    run = enjoy.read_run(run_folder)
    try:
        runs.require_printable(run["file"], "file")
        for name, value in run["args"].items():
            runs.to_words(name, value)
    except (TypeError, ValueError) as error:
        raise SystemExit(f"refused {repo_id}: run.json: {one_line(error)}") from None


def pull(repository, into=Path("runs")):
    """The folder of a run, made from a repository on the Hub: all of it, or none."""
    need(*EXTRA)
    from huggingface_hub import HfApi, hf_hub_download
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()
    repo_id = str(repository).removeprefix("hf://").rstrip("/")
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repo_id):
        problem = "is not the name of a repository: it should be entity/repository"
        raise SystemExit(f"{repository} {problem}")
    with asking_the_hub(f"find {repo_id}"):
        info = HfApi().model_info(repo_id, files_metadata=True)
    if not re.fullmatch("[0-9a-f]{40}", str(info.sha)):
        raise SystemExit(f"refused {repo_id}: it has no commit")
    run_folder = into / f"{repo_id.replace('/', '__')}__{info.sha[:8]}"
    if run_folder.exists():  # of the same commit, so it is the same
        print(f"run folder: {run_folder}")
        return run_folder
    wanted = check_names_and_sizes(repo_id, {file.rfilename: file.size for file in info.siblings})
    with explain(f"write to {into}"):
        into.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=".pull-", dir=into))
    try:
        for name in wanted:
            with asking_the_hub(f"fetch {name} of {repo_id}"):
                fetched = hf_hub_download(repo_id, name, revision=info.sha)
            if os.path.getsize(fetched) > LIMIT:
                raise SystemExit(f"refused {repo_id}: {name} has more than {LIMIT >> 20} MiB")
            # a file of code becomes text, which is never run
            shutil.copyfile(fetched, folder / (f"{name}.txt" if name.endswith(".py") else name))
        if not {"run.json", "model.safetensors"} <= set(wanted):
            read_public(repo_id, folder)
        check_run(repo_id, folder)
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
        needs = f"it should be called ENV_ID-{exp_name}-seedN and have one .cleanrl_model"
        raise SystemExit(f"cannot tell what {repo_id} is: {needs}")
    if exp_name in NO_NORMALIZER:
        problem = f"models of CleanRL v1's {exp_name}.py come without their observation normalizer"
        raise SystemExit(f"cannot play {repo_id}: {problem}")
    if exp_name not in PUBLIC_TORCH and exp_name not in PUBLIC_JAX:
        problem = f"no file has the networks of CleanRL v1's {exp_name}.py"
        raise SystemExit(f"cannot play {repo_id}: {problem}")
    try:
        checkpoint = (public_torch if exp_name in PUBLIC_TORCH else public_jax)(exp_name, path)
        # a small file can stand for large tensors
        size = sum(part.nbytes for _, part in flatten(checkpoint))
        runs.require(size <= LIMIT, f"weights of {size} bytes")
        save_weights(checkpoint, folder / "model.safetensors")
    except Exception as error:
        problem = f"{path.name}: {type(error).__name__}: {error}".splitlines()[0]
        raise SystemExit(f"refused {repo_id}: {problem}") from None
    path.unlink()
    args = {"exp_name": exp_name, "env_id": found[1], "seed": int(found[2])}
    run = {"file": f"{exp_name}.py", "args": args, "start_time": time.time()}
    (folder / "run.json").write_text(json.dumps(run | {"source": f"hf://{repo_id}"}, indent=2))


def public_torch(exp_name, path):
    weights = torch.load(path, map_location="cpu", weights_only=True)
    weights = weights["model_weights"] if exp_name.startswith("c51") else weights
    part, names = PUBLIC_TORCH[exp_name]
    if part == "actor":  # beside its critics
        weights = {name: x for name, x in weights[0].items() if not name.startswith("action_")}
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
        layers = {f"Dense_{i}": params[f"Dense_{i}"] for i in range(3)}
        return {"agent": {"actor": {"params": layers}}}
    if not exp_name.startswith("c51"):
        return {"agent": {"params": weights}}
    v_min, v_max, n_atoms = (weights["args"][name] for name in ("v_min", "v_max", "n_atoms"))
    assert 1 < n_atoms <= 10_000, f"{n_atoms} atoms"
    atoms = np.linspace(v_min, v_max, n_atoms, dtype=np.float32)
    return {"agent": {"params": weights["model_weights"], "atoms": atoms}}


def main():
    asked = tyro.cli(Push | Pull, prog="python -m cleanrl_utils.hub", description=__doc__)
    (push if isinstance(asked, Push) else pull)(**vars(asked))


if __name__ == "__main__":
    main()
