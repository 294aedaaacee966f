"""The sides of a comparison and their runs: from run folders, results/ or Weights & Biases."""

import csv
import os
import re
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from urllib.parse import parse_qs

import numpy as np

from cleanrl_utils import runs as run_folders
from cleanrl_utils.errors import plain
from cleanrl_utils.events import read_events

RESULTS = Path(__file__).resolve().parents[2] / "results"  # the published data
NOT_SETTINGS = set("seed env_id resume track capture_video num_seeds sweep".split())
NOT_SETTINGS |= set("wandb_project_name wandb_entity wandb_group".split())
HARMLESS = set("cuda torch_deterministic compile checkpoint_interval checkpoint_buffer".split())
REPEATED = "is an earlier run of the same seed as"
QUERY = {"wpn": "project", "we": "entity", "user": "user", "metric": "metric"}
QUERY |= {"ceik": "env_key", "cen": "exp_key"}  # as openrlbenchmark names them


@dataclass
class Side:
    label: str
    exp_name: str  # or results:FOLDER for the published data
    metric: str
    tags: tuple[str, ...] = ()
    flags: dict = field(default_factory=dict)  # name: the values that count, as text
    project: str | None = None  # of Weights & Biases
    entity: str | None = None
    user: str | None = None
    env_key: str = "env_id"  # flag that names the environment
    exp_key: str = "exp_name"  # flag that names the experiment
    env_ids: dict = field(default_factory=dict)  # {id of its runs: name in the comparison}, or all


@dataclass
class Run:
    name: str
    env_id: str
    exp_name: str
    seed: str
    flags: dict  # name: value as text, and so the versions
    versions: dict
    tags: tuple[str, ...]
    total: int  # planned steps, 0 if unknown
    source: object  # its folder, its CSV in results/, or wandb's run
    link: str = ""
    started: float = 0.0
    step: int = 0  # how far it got
    state: str = ""  # why it does not count; empty if it does
    is_short: bool = False  # and that is only that it did not get to its end
    is_thinned: bool = False  # its rows are means of episodes, but for the last 100
    notes: list = field(default_factory=list)  # what else is to be said of it
    metrics: list = field(default_factory=list)  # what it logged
    # (step, value, seconds, how many episodes it is the mean of)
    rows: np.ndarray = field(default_factory=lambda: np.zeros((0, 4)))

    @property
    def settings(self):
        return {name: value for name, value in self.flags.items() if name not in NOT_SETTINGS}

    def final(self, window, until=np.inf):
        """The mean of its last episodes up to a step."""
        rows = self.rows[self.rows[:, 0] <= until]
        return run_folders.mean_of_last(rows[:, 1], run_folders.episodes_of(rows), window)


def canonical(value):
    """A value in one form: 2.5e-3 is 0.0025, false is False."""
    try:
        return str(float(value))
    except ValueError:
        return value.strip().lower()


def parse_sides(args):
    """The sides that the command line asks for; none if it asks for none."""
    if args.filters and (args.exp_name or args.tags):
        raise SystemExit("give --filters, or --exp-name and --tags, not both")
    if args.tags and not args.exp_name:
        raise SystemExit("--tags needs --exp-name")
    if len(args.env_ids) > 1 and len(args.env_ids) != len(args.filters):
        raise SystemExit("give --env-ids once, or once for each --filters")
    if len({len(group) for group in args.env_ids}) > 1:
        raise SystemExit("each --env-ids must name as many environments as the first")
    common = dict(project=args.wandb_project_name, entity=args.wandb_entity, metric=args.metric)
    if args.exp_name:
        common["env_ids"] = name_envs(args, 0)
        labels = {plain(f"{args.exp_name} {tag}"): (tag,) for tag in args.tags}
        labels = labels or {plain(args.exp_name): ()}
        return [Side(label, args.exp_name, tags=tags, **common) for label, tags in labels.items()]
    sides = []
    for number, group in enumerate(args.filters):
        shared = common | {"env_ids": name_envs(args, number)}
        for text in group:
            name, _, query = text.partition("?")
            options = parse_qs(query, keep_blank_values=True)
            chosen = {QUERY[key]: options.pop(key)[-1] for key in QUERY if key in options}
            if not name:  # holds for those that follow
                shared |= chosen
                continue
            tags, caption = tuple(options.pop("tag", ())), options.pop("cl", [None])[-1]
            flags = {key.replace("-", "_"): values for key, values in options.items()}
            words = [name, *tags, *(f"{key}={','.join(flags[key])}" for key in flags)]
            label = plain(caption or " ".join(words))
            sides.append(Side(label, name, tags=tags, flags=flags, **(shared | chosen)))
    labels = [side.label for side in sides]
    if twice := [label for label in labels if labels.count(label) > 1]:
        raise SystemExit(f"two sides are called {twice[0]}: tell them apart with cl=")
    return sides


def name_envs(args, number):
    """{environment of a group of filters: the first group's environment that it stands beside}"""
    if not args.env_ids:
        return {}
    group = args.env_ids[min(number, len(args.env_ids) - 1)]
    return dict(zip(group, args.env_ids[0], strict=True))


def make_run(name, config, side, **more):
    """A run of these flags, with nothing in it that could do harm."""
    flags = {plain(key): plain(value) for key, value in config.items()}
    total, tags = config.get("total_timesteps", 0), more.pop("tags", None) or ()
    return Run(
        name=plain(name, 300),
        env_id=flags[side.env_key],
        exp_name=flags.get(side.exp_key, "?"),
        seed=flags.get("seed", plain(name)),
        flags=flags,
        total=total if isinstance(total, int) else 0,
        tags=tuple(map(plain, tags)),
        **more,
    )


def read_versions(about):
    names = ("file", "sha256", "commit", "dirty", "python", "device")
    packages = about.get("packages")
    packages = packages if isinstance(packages, dict) else {}
    versions = {name: about[name] for name in names if about.get(name)} | packages
    return {plain(name): plain(version) for name, version in versions.items()}


def find_local(folders):
    """[(folder, run.json)] of all runs in these folders, and a line for each that has no such."""
    found, problems = [], []
    for parent in folders:
        if not parent.is_dir():
            raise SystemExit(f"there is no folder {parent}")
        for folder in run_folders.find_runs(parent):
            try:
                found.append((folder, run_folders.read_run(folder)))
            except Exception as error:
                missing = isinstance(error, FileNotFoundError)
                reason = "it has no run.json" if missing else f"run.json: {plain(error)}"
                problems.append(f"{plain(folder.name, 300)} was not read: {reason}")
    return found, problems


def list_local(side, found, problems):
    runs = []
    for folder, about in found:
        started = about.get("start_time", 0)
        more = dict(tags=about.get("tags"), versions=read_versions(about), source=folder)
        more["started"] = started if isinstance(started, int | float) else 0.0
        try:
            runs.append(make_run(folder.name, about["args"], side, **more))
        except Exception as error:
            problem = f"{plain(folder.name, 300)} was not read: run.json: {plain(error)}"
            problems += [problem] if problem not in problems else []
    return runs


def list_results(side):
    """The published runs in results/FOLDER."""
    name = side.exp_name.removeprefix("results:")
    there = sorted({path.parent.name for path in RESULTS.glob("*/*__*.csv")})
    if name not in there:
        raise SystemExit(f"there is no results/{plain(name)}: found {', '.join(there)}")
    runs = []
    for run_name, about in run_folders.read_json(RESULTS / name / "runs.json").items():
        source, versions = RESULTS / name / f"{run_name}.csv", read_versions(about)
        runs.append(make_run(run_name, about["args"], side, versions=versions, source=source))
        runs[-1].exp_name = side.exp_name
        runs[-1].step = about.get("steps", runs[-1].total)
    return runs


def list_wandb(side):
    import wandb

    conditions = [{f"config.{side.exp_key}.value": side.exp_name}]
    conditions += [{"tags": tag} for tag in side.tags]
    conditions += [{"username": side.user}] if side.user else []
    if side.env_ids:
        conditions.append({f"config.{side.env_key}.value": {"$in": list(side.env_ids)}})
    path = f"{side.entity}/{side.project}" if side.entity else side.project
    runs = []
    for source in wandb.Api().runs(path, filters={"$and": conditions}):
        more = dict(tags=source.tags, source=source)
        more["versions"] = {"commit": plain(source.commit)} if source.commit else {}
        more["link"] = source.url if re.match("https?://", source.url) else ""
        more["started"] = float(source.summary.get("_timestamp") or 0)
        runs.append(make_run(source.name, source.config, side, **more))
    return runs


def choose(side, runs, where):
    """The runs of a side; where there are none, say what there is instead."""
    named = [run for run in runs if run.exp_name == side.exp_name and {*side.tags} <= {*run.tags}]
    if not named:
        has = sorted({" ".join([run.exp_name, *run.tags]) for run in runs})
        hint = f": found {', '.join(has[:20])}" if has else f" with the flag {side.env_key}"
        raise SystemExit(f"no run of {side.label} in {where}{hint}")
    for name, values in side.flags.items():
        known = {run.flags[name] for run in named if name in run.flags}
        if not known:
            flags = sorted({flag for run in named for flag in run.flags})
            meant = [
                flag for flag in flags if "".join(word[:1] for word in flag.split("_")) == name
            ]
            close = meant or get_close_matches(name, flags, 3) or flags
            raise SystemExit(f"{side.label}: its runs have no flag {name}: {', '.join(close)}?")
        wanted = {canonical(value) for value in values}
        named = [run for run in named if canonical(run.flags.get(name, "")) in wanted]
        if not named:
            has = f"{name} is {', '.join(sorted(known))}"
            raise SystemExit(f"no run of {side.label} in {where}: {has}")
    chosen = [run for run in named if run.env_id in side.env_ids or not side.env_ids]
    if side.env_ids:  # in the order in which they were asked for
        chosen.sort(key=lambda run: list(side.env_ids).index(run.env_id))
    if not chosen:
        has = ", ".join(sorted({run.env_id for run in named}))
        asked = ", ".join(side.env_ids)
        raise SystemExit(f"no run of {side.label} on {plain(asked)} in {where}: found {has}")
    for run in chosen:
        beside = plain(side.env_ids.get(run.env_id, run.env_id))
        if beside != run.env_id:
            run.notes.append(f"{run.env_id} is paired with {beside}")
            run.env_id = beside
    return chosen


def collect(args):
    """{label: the runs of that side}, with their episodes, and what was not read."""
    sides, found, problems = parse_sides(args), [], []
    where = plain(", ".join(map(str, args.runs)))
    if not sides or any(not side.project and is_local(side) for side in sides):
        found, problems = find_local(args.runs)
    if not sides:
        every = Side("all", "all", args.metric, env_ids=name_envs(args, 0))
        local = list_local(every, found, problems)
        names = sorted({run.exp_name for run in local})
        on_envs = {run.exp_name for run in local if run.env_id in every.env_ids}
        sides = [Side(name, name, args.metric, env_ids=every.env_ids) for name in names]
        sides = [side for side in sides if side.exp_name in on_envs] or sides
    if not sides:
        raise SystemExit(f"no run in {where}")
    chosen = {}
    for side in sides:
        if not is_local(side):
            chosen[side.label] = choose(side, list_results(side), "results")
            for run in chosen[side.label]:
                read_result(run, side.metric)
        elif side.project:
            chosen[side.label] = read_wandb(side, args.scan_history)
        else:
            chosen[side.label] = choose(side, list_local(side, found, problems), where)
            read_folders(chosen[side.label], side.metric)
    return sides, chosen, problems


def is_local(side):
    return not side.exp_name.startswith("results:")


def read_folders(runs, metric):
    """Read the episodes of runs in folders, in several processes if there is much to read."""
    folders = [run.source for run in runs]
    size = sum(path.stat().st_size for folder in folders for path in folder.glob("*tfevents*"))
    if size < 2**24:
        results = map(read_events, folders)
    else:
        with ProcessPoolExecutor(min(os.cpu_count() or 1, 8)) as pool:
            results = list(pool.map(read_events, folders, chunksize=2))
    for run, (scalars, problems) in zip(runs, results, strict=True):
        run.notes += map(plain, problems)
        set_episodes(run, metric, scalars)
        written = [path.stat().st_mtime for path in run.source.glob("*tfevents*")]
        if run.is_short and time.time() - max(written) < 150:
            run.state += ", and is still being written"


def read_result(run, metric):
    with run.source.open(newline="") as file:
        lines = list(csv.reader(file))
    rows, end = np.array(lines[1:], dtype=float), np.array([[run.step, 0.0, 0.0]])
    run.is_thinned = len(rows) == 2100
    set_episodes(run, metric, {f"charts/{lines[0][1]}": rows, "end": end})


def read_wandb(side, scan_history):
    """The runs of a side in Weights & Biases, with their episodes."""
    try:
        runs = choose(side, list_wandb(side), plain(side.project))
        for run in runs:
            rows = read_history(run.source, side.metric, scan_history)
            reached = max(
                float(run.source.summary.get("global_step") or 0), rows[:, 0].max(initial=0)
            )
            end = np.array([[reached, 0.0, 0.0]])
            set_episodes(run, side.metric, {side.metric: rows, "end": end})
            if run.source.state != "finished":
                run.is_short |= bool(len(rows)) and not run.state
                at = f"at step {run.step:,} of {run.total:,}"
                run.state = f"is {plain(run.source.state)}, {at}"
            run.metrics = [plain(name) for name in run.source.summary.keys()]  # noqa: SIM118
        return runs
    except Exception as error:
        why = plain(str(error) or type(error).__name__, 300)
        raise SystemExit(f"cannot read {side.label} from Weights & Biases: {why}") from None


def read_history(source, metric, scan_history):
    """The rows (step, value, seconds) of a run; without global_step, its own count of steps."""
    for step in ("global_step", "_step"):
        keys = [metric, step, "_runtime"]
        if scan_history:
            history = source.scan_history(keys=keys)
        else:
            history = source.history(samples=500, keys=keys, pandas=False)
        if rows := [[row[step], row[metric], row["_runtime"]] for row in history]:
            return np.array(rows, dtype=np.float64)
    return np.zeros((0, 3))


def set_episodes(run, metric, scalars):
    """Put the episodes into a run and judge whether it may count."""
    rows = scalars.get(metric, np.zeros((0, 3)))
    counts = np.ones(len(rows))
    if metric in ("charts/episodic_return", "charts/episodic_length") and len(rows):
        counts = run_folders.count_episodes(scalars | {"charts/episodic_return": rows})
    rows = np.column_stack([rows, counts])
    rows = rows[np.argsort(rows[:, 0], kind="stable")]
    rows[:, 2] = np.maximum.accumulate(rows[:, 2])
    run.rows, run.step, run.metrics = rows, run_folders.last_step(scalars), list(scalars)
    finite = np.isfinite(rows[:, 1])
    if not len(rows):
        run.state = f"has no {metric}"
    elif not finite.all():
        run.state = f"diverged: a return at step {int(rows[~finite, 0][0]):,} is not a number"
    elif not run_folders.is_finished({"args": {"total_timesteps": run.total}}, scalars):
        run.state, run.is_short = f"got to step {run.step:,} of {run.total:,}", True


def split(label, runs, ignored=()):
    """{label: runs} by the settings that differ on one environment, and a note that names them."""
    counting = sorted((run for run in runs if not run.state), key=lambda run: run.started)
    names = differing_settings(counting, HARMLESS | set(ignored))
    if not names:
        return {label: runs}, []

    def values(run, names=names):
        return tuple(canonical(run.settings.get(name, "none")) for name in names)

    def count_groups(names):
        return len({values(run, names) for run in counting})

    groups = {}
    for run in counting:
        groups.setdefault(values(run), []).append(run)
    telling = []  # the first settings that tell the groups apart
    for name in names:
        if count_groups([*telling, name]) > count_groups(telling):
            telling.append(name)
    largest_first = sorted(groups.values(), key=len, reverse=True)
    named = {}
    for group in largest_first:
        words = [f"{name}={group[0].settings.get(name, 'none')}" for name in telling]
        named[" ".join([label, *words])] = group
    for run in runs:
        if run.state:
            groups.get(values(run), largest_first[0]).append(run)
    found = [f"{name} ({', '.join(all_values(counting, name))})" for name in names]
    return named, [f"{label}: its runs differ in {', '.join(found)}: they are compared separately"]


def all_values(runs, name):
    return list(dict.fromkeys(run.settings.get(name, "none") for run in runs))


def differing_settings(runs, ignored):
    """The settings that differ between runs on one environment."""
    names = dict.fromkeys(name for run in runs for name in run.settings if name not in ignored)
    differing = []
    for name in names:
        values = {}
        for run in runs:
            value = canonical(run.settings.get(name, "none"))
            values.setdefault(run.env_id, set()).add(value)
        if any(len(of_env) > 1 for of_env in values.values()):
            differing.append(name)
    return differing


def note_versions(label, runs):
    """A note if the runs that count are of several versions of the code."""
    for name in ("file", "sha256", "commit"):
        found = {run.versions[name][:12] for run in runs if not run.state and name in run.versions}
        if len(found) > 1:
            return [f"{label}: its runs differ in {name}: {', '.join(sorted(found))}"]
        if name == "sha256" and found:  # the file is the same: the commit does not matter
            break
    return []


def leave_out_repeats(runs):
    """A seed counts once: its last finished run."""
    latest = {}
    for run in sorted(runs, key=lambda run: run.started):
        if not run.state:
            if old := latest.get((run.env_id, run.seed)):
                old.state = f"{REPEATED} {run.name}"
            latest[run.env_id, run.seed] = run
