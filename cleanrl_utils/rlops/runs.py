"""The runs that rlops compares: from folders or from Weights & Biases, with their episodes."""

import json
import os
import re
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.parse import parse_qs

import numpy as np

from cleanrl_utils.events import read_events
from cleanrl_utils.rlops.report import plain

NOT_SETTINGS = {
    "seed",
    "env_id",
    "resume",
    "track",
    "capture_video",
    "wandb_project_name",
    "wandb_entity",
    "wandb_group",
}


@dataclass
class Side:
    label: str
    exp_name: str
    tags: tuple[str, ...] = ()
    flags: dict = field(default_factory=dict)  # name: value as text
    project: str | None = None
    entity: str | None = None
    metric: str | None = None


@dataclass
class Run:
    name: str
    env_id: str
    exp_name: str
    seed: str
    tags: tuple[str, ...]
    settings: dict  # name: value as text, and so the versions
    versions: dict
    total: int  # steps it was to make, 0 if unknown
    folder: Path | None = None
    link: str = ""
    started: float = 0.0
    state: str = ""  # why it does not count, if it does not
    is_short: bool = False  # and that is only that it did not get to its end
    notes: list = field(default_factory=list)  # what else is to be said of it
    rows: np.ndarray = field(
        default_factory=lambda: np.zeros((0, 3))
    )  # (step, return, seconds) of each episode
    step: int = 0  # how far it got

    def final(self, window):
        return self.rows[-window:, 1].mean()


def parse_sides(args):
    if args.filters and (args.exp_name or args.tags):
        raise SystemExit("give --filters, or --exp-name and --tags, not both")
    if args.tags and not args.exp_name:
        raise SystemExit("--tags needs --exp-name: whose runs?")
    common = dict(project=args.wandb_project_name, entity=args.wandb_entity, metric=args.metric)
    if args.exp_name:
        sides = [
            Side(plain(f"{args.exp_name} {tag}"), args.exp_name, (tag,), **common)
            for tag in args.tags
        ]
        return sides or [Side(plain(args.exp_name), args.exp_name, **common)]
    sides = []
    for text in args.filters:
        name, _, query = text.partition("?")
        options = parse_qs(query, keep_blank_values=True)
        keys = {"wpn": "project", "we": "entity", "metric": "metric"}
        chosen = common | {keys[key]: options.pop(key)[-1] for key in keys if key in options}
        if options.pop("ceik", ["env_id"]) != ["env_id"] or options.pop("cen", ["exp_name"]) != [
            "exp_name"
        ]:
            raise SystemExit(
                f"{plain(text)}: "
                "environments are told by env_id and experiments by exp_name, no others"
            )
        if not name:  # holds for those that follow
            common = chosen
            continue
        tags, caption = tuple(options.pop("tag", ())), options.pop("cl", [None])[-1]
        flags = {key.replace("-", "_"): values[-1] for key, values in options.items()}
        words = [name, *tags, *(f"{key}={value}" for key, value in flags.items())]
        sides.append(Side(plain(caption or " ".join(words)), name, tags, flags, **chosen))
    return sides


def read_run(folder):
    """What run.json says, with nothing in it that could do harm."""
    path = folder / "run.json"
    if path.stat().st_size > 2**24:
        raise ValueError("run.json is too large")
    about = json.loads(path.read_text())
    flags = {plain(name): plain(value) for name, value in dict(about["args"]).items()}
    versions = {
        name: plain(about[name])
        for name in ("file", "sha256", "commit", "dirty", "python", "device")
        if about.get(name)
    }
    packages = about.get("packages")
    versions |= {
        plain(name): plain(version)
        for name, version in (packages if isinstance(packages, dict) else {}).items()
    }
    total = about["args"].get("total_timesteps", 0)
    started = about.get("start_time", 0)
    return Run(
        name=plain(folder.name, 300),
        env_id=flags["env_id"],
        exp_name=flags["exp_name"],
        seed=flags.get("seed", "?"),
        tags=tuple(map(plain, about.get("tags") or ())),
        settings={name: value for name, value in flags.items() if name not in NOT_SETTINGS},
        versions=versions,
        total=total if isinstance(total, int) else 0,
        folder=folder,
        started=started if isinstance(started, (int, float)) else 0.0,
    )


def find_runs(folders):
    """All runs in these folders, without episodes, and a line for each folder that is no run."""
    found, problems = [], []
    for parent in folders:
        if not parent.is_dir():
            raise SystemExit(f"there is no folder {parent}")
        for folder in (
            [parent]
            if (parent / "run.json").exists()
            else sorted(filter(Path.is_dir, parent.iterdir()))
        ):
            try:
                found.append(read_run(folder))
            except Exception as error:
                reason = (
                    "it has no run.json"
                    if isinstance(error, FileNotFoundError)
                    else f"run.json: {plain(error)}"
                )
                problems.append(f"{plain(folder.name, 300)} was not read: {reason}")
    return found, problems


def is_on(run, side, env_ids):
    return (
        run.exp_name == side.exp_name
        and set(side.tags) <= set(run.tags)
        and all(
            run.settings.get(name, run.seed if name == "seed" else None) == value
            for name, value in side.flags.items()
        )
        and (not env_ids or run.env_id in env_ids)
    )


def read_episodes(runs, metric):
    """Read the episodes of runs in folders, in several processes if there is much to read."""
    folders = [run.folder for run in runs]
    size = sum(path.stat().st_size for folder in folders for path in folder.glob("*tfevents*"))
    if size < 2**24:
        results = map(read_events, folders)
    else:
        with ProcessPoolExecutor(min(os.cpu_count() or 1, 8)) as pool:
            results = list(pool.map(read_events, folders, chunksize=2))
    for run, (scalars, problems) in zip(runs, results, strict=True):
        run.notes += map(plain, problems)
        set_episodes(run, metric, scalars.get(metric), scalars)


def set_episodes(run, metric, rows, scalars):
    """Put the episodes into a run and judge whether it may count."""
    if rows is not None:
        rows = rows[np.argsort(rows[:, 0], kind="stable")]
        rows[:, 2] = np.maximum.accumulate(rows[:, 2])
        run.rows = rows
    run.step = int(max((tag_rows[:, 0].max() for tag_rows in scalars.values()), default=0))
    logged = scalars.get("charts/SPS", np.zeros((0, 3)))[:, 0]
    between_logs = np.median(np.diff(logged)) if len(logged) > 1 else 0.05 * run.total
    if not len(run.rows):
        run.state = f"has no {metric}"
    elif not np.isfinite(run.rows[:, 1]).all():
        step = int(run.rows[~np.isfinite(run.rows[:, 1]), 0][0])
        run.state = f"diverged: a return at step {step:,} is no number"
    elif run.step + max(between_logs, 1) <= run.total:
        run.state, run.is_short = f"got to step {run.step:,} of {run.total:,}", True
        if (
            run.folder
            and time.time() - max(path.stat().st_mtime for path in run.folder.glob("*tfevents*"))
            < 150
        ):
            run.state += ", and is still being written"


def read_wandb(side, args):
    """The runs of one side, with their episodes, from Weights & Biases."""
    try:
        import wandb

        conditions = [
            {"config.exp_name.value": side.exp_name},
            *({"tags": tag} for tag in side.tags),
        ]
        conditions += [{"config.env_id.value": {"$in": list(args.env_ids)}}] if args.env_ids else []
        path = f"{side.entity}/{side.project}" if side.entity else side.project
        found = [
            fetch(run, side, args) for run in wandb.Api().runs(path, filters={"$and": conditions})
        ]
    except Exception as error:
        why = plain(str(error) or type(error).__name__, 300)
        raise SystemExit(f"cannot read {side.label} from Weights & Biases: {why}") from None
    return [run for run in found if is_on(run, side, args.env_ids)]


def fetch(source, side, args):
    """A run of ours from one of wandb's."""
    flags = {plain(name): plain(value) for name, value in source.config.items()}
    total = source.config.get("total_timesteps", 0)
    run = Run(
        name=plain(source.name, 300),
        env_id=flags.get("env_id", "?"),
        exp_name=flags.get("exp_name", "?"),
        seed=flags.get("seed", "?"),
        tags=tuple(map(plain, source.tags or ())),
        settings={name: value for name, value in flags.items() if name not in NOT_SETTINGS},
        versions={"commit": plain(source.commit)} if source.commit else {},
        total=total if isinstance(total, int) else 0,
        link=source.url if re.match("https?://", source.url) else "",
        started=float(source.summary.get("_timestamp") or 0),
    )
    keys = [side.metric, "global_step", "_runtime"]
    history = (
        source.scan_history(keys=keys)
        if args.scan_history
        else source.history(samples=500, keys=keys, pandas=False)
    )
    rows = np.array(
        [[row["global_step"], row[side.metric], row["_runtime"]] for row in history],
        dtype=np.float64,
    )
    step = max(float(source.summary.get("global_step") or 0), rows[:, 0].max() if len(rows) else 0)
    set_episodes(run, side.metric, rows if len(rows) else None, {"all": np.array([[step, 0, 0]])})
    if source.state != "finished":
        run.is_short |= bool(len(rows)) and not run.state
        run.state = f"is {plain(source.state)}, at step {run.step:,} of {run.total:,}"
    return run


def leave_out_repeats(runs):
    """A seed counts once: its last finished run."""
    latest = {}
    for run in sorted(runs, key=lambda run: run.started):
        if not run.state:
            old = latest.get((run.env_id, run.seed))
            latest[run.env_id, run.seed] = run
            if old:
                old.state = f"is an earlier run of the same seed as {run.name}"


def collect(args):
    """{side: its runs}, and what was not read."""
    sides, problems = parse_sides(args), []
    local = []
    if not sides or not all(side.project for side in sides):
        local, problems = find_runs(args.runs)
        if not sides:
            names = sorted(
                {run.exp_name for run in local if not args.env_ids or run.env_id in args.env_ids}
            )
            sides = [Side(name, name, metric=args.metric) for name in names]
    where = ", ".join(map(str, args.runs))
    if not sides:
        raise SystemExit(f"no run in {where}")
    found = {}
    for side in sides:
        if side.label in found:
            raise SystemExit(f"two sides are called {side.label}: tell them apart with cl=")
        if side.project:
            found[side.label] = read_wandb(side, args)
            continue
        found[side.label] = [
            replace(run, notes=[]) for run in local if is_on(run, side, args.env_ids)
        ]
        read_episodes(found[side.label], side.metric)
    for side in sides:
        if not found[side.label]:
            has = sorted({" ".join([run.exp_name, *run.tags]) for run in local})
            hint = f": there is {', '.join(has[:20])}" if has else ""
            raise SystemExit(f"no run of {side.label} in {side.project or where}{hint}")
    return found, problems
