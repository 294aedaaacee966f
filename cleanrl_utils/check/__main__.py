import ast
import json
import math
import os
import re
import sys
import tempfile
import textwrap
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import tyro
from rich.console import Console
from rich.text import Text

from cleanrl_utils import check, errors, processes, runs
from cleanrl_utils.bands import place_run, read_bands
from cleanrl_utils.check import explain, race
from cleanrl_utils.check import parent as parents
from cleanrl_utils.check.explain import CONTRACT
from cleanrl_utils.check.parent import FILES, ROOT

COLORS = {"ok": "green", "changed": "cyan", "skipped": "dim", "untested": "yellow"}
BAD = ("broken", "missing", "slow", "below", "dead")
SLOW = 0.85  # of the parent's speed, in both rounds
ORDER = ("file", "detail", "known answer", "contract", "other", "speed", "profile", "training")
TEST = ("id", "outcome", "seconds")  # what the report tells of each test


@dataclass
class Args:
    file: tyro.conf.Positional[str | None] = None  # the file to check
    against: str | None = None  # the file it is based on, such as ppo (found if not given)
    changed: tuple[str, ...] = ()  # details that were changed on purpose, such as "core 7"
    quick: bool = False  # leave out speed and training
    only: str = ""  # run only the tests whose names contain this
    run: str | None = None  # only compare a run folder with the published runs
    output: Path = Path("checks")  # folder for the report as Markdown and JSON


@dataclass
class Row:
    part: str
    what: str
    verdict: str
    seen: str = ""


def prepare(source, parent, folder):
    """The copy under test: named like its parent, with its parent's defaults."""
    path = folder / "copy" / f"{parent}.py"
    path.parent.mkdir()
    path.write_text(parents.with_defaults_of(source, FILES[parent].read_text()))
    return path


def compile_once(folder):
    """What one of the processes below compiles, the others find there."""
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(folder))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.5")


def run_tests(copy, own_folder, folder, only):
    """Each test of the parent on the copy, as dictionaries, from up to two pytest processes."""
    parts = 1 if only else min(2, os.cpu_count() or 1)
    started, reports = [], []
    tests = [str(parents.find_tests(copy.stem)), "tests/test_contract.py"]
    quiet = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "cleanrl_utils.check.plugin"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    for part in range(1, parts + 1):
        report, log = folder / f"part{part}.jsonl", folder / f"part{part}.log"
        report.touch()
        options = ["--check-report", report, "--check-part", f"{part}/{parts}", "--file", copy]
        options += ["--check-only", only, "--check-folder", own_folder]
        options += ["--basetemp", folder / f"tests{part}"]
        command = [sys.executable, "-m", "pytest", *quiet, *map(str, options), *tests]
        with log.open("wb") as output:
            process = processes.start(command, output=output, cwd=ROOT, env=environment)
        started.append((process, log))
        reports.append(report)
    try:
        show_progress([process for process, _ in started], reports)
    finally:
        for process, _ in started:
            processes.kill(process)
    records = [json.loads(line) for report in reports for line in report.read_text().splitlines()]
    for process, log in started:
        if process.returncode not in (0, 1, 5):  # neither passed nor failed
            lines = log.read_text().strip().splitlines() or ["no output"]
            records.append({"test": "pytest", "id": "pytest", "module": "", "outcome": "broken"})
            seen = f"ended with status {process.returncode}: {lines[-1][:200]}"
            records[-1] |= {"seen": seen, "seconds": 0}
    return [record for record in records if "test" in record]


def show_progress(processes, reports):
    while True:
        is_over = all(process.poll() is not None for process in processes)
        lines = [json.loads(x) for path in reports for x in path.read_text().splitlines()]
        total = sum(line.get("total", 0) for line in lines)
        done = sum("test" in line for line in lines)
        if sys.stderr.isatty() and total:
            print(f"\rtests: {done} of {total}", end="", file=sys.stderr, flush=True)
        if is_over:
            print("\r" + " " * 30 + "\r" if sys.stderr.isatty() else "", end="", file=sys.stderr)
            return
        time.sleep(0.3)


def tags_of(test):
    """The details that a test is named after: core 3 ... core 12 for core_3_to_12."""
    tags = [f"{a} {b}" for a, b in re.findall(r"_([a-z][a-z0-9]*)_(\d+)(?=_|$)", test)]
    tags = [tag for tag in tags if not tag.startswith("to ")]
    for family, first, last in re.findall(r"_([a-z][a-z0-9]*)_(\d+)_to_(\d+)", test):
        tags += [f"{family} {n}" for n in range(int(first), int(last) + 1)]
    return set(tags)


def worst(records):
    order = ("broken", "untested", "ok", "skipped")
    return min(records, key=lambda record: order.index(record["outcome"]))


def judge_details(details, records, source):
    """A row for each detail, by its tests; where there is none, by its code."""
    rows, own_lines = [], set(parents.code_lines(source))
    for detail in details:
        tests = [record for record in records if detail.tag in tags_of(record["test"])]
        what = f"[{detail.tag}] {detail.title}"
        if not tests or worst(tests)["outcome"] in ("skipped", "untested"):
            seen = worst(tests)["seen"] if tests else ""
            if all(line in own_lines for line in detail.lines):
                text = f"the code is its parent's{'; ' * bool(seen)}{seen}"
                rows.append(Row("detail", what, "ok", text))
            elif detail.is_changed:
                rows.append(Row("detail", what, "changed", "on purpose"))
            else:
                text = f"the code is not its parent's{'; ' * bool(seen)}{seen}"
                rows.append(Row("detail", what, "untested" if tests else "changed", text))
            continue
        outcome, seen = worst(tests)["outcome"], worst(tests)["seen"]
        if outcome == "ok":
            count = sum(record["outcome"] == "ok" for record in tests)
            seen = "declared as changed, but it is not" if detail.is_changed else ""
            rows.append(Row("detail", what, "ok", seen or f"tests passed: {count}"))
        elif detail.is_changed:
            rows.append(Row("detail", what, "changed", f"on purpose: {seen}"))
        else:
            rows.append(Row("detail", what, "broken" if detail.is_marked else "missing", seen))
    return rows


def judge_others(details, records):
    """Rows for known answers and the contract; what passed elsewhere is one row."""
    if any(explain.NO_NEXT_VALUE in record["seen"] for record in records):  # whatever the end is
        for record in records:
            record["seen"] = record["seen"].replace(f": {explain.CUT_AS_END}", "")
    known_tags, rows, passed = {detail.tag for detail in details}, [], 0
    by_test = {}
    for record in records:
        if not tags_of(record["test"]) & known_tags:
            by_test.setdefault(record["test"], []).append(record)
    for test, group in by_test.items():
        record, words = worst(group), test.removeprefix("test_").replace("_", " ")
        if "probe" in test or "_answers" in test:
            rows += [judge_probe(one, words) for one in group]
            continue
        is_contract = test in CONTRACT or "seed" in test or "resume" in test or "video" in test
        part = "contract" if is_contract or "refused" in test else "other"
        if part == "other" and record["outcome"] in ("ok", "skipped"):
            passed += 1
            continue
        rows.append(Row(part, CONTRACT.get(test, words), record["outcome"], record["seen"]))
    if passed:
        rows.append(Row("other", "further tests of its parent", "ok", f"passed: {passed}"))
    return rows


def judge_probe(record, words):
    name = record["id"].partition("[")[2].rstrip("]").split("-values")[0]
    return Row(
        "known answer", f"{words}{': ' * bool(name)}{name}", record["outcome"], record["seen"]
    )


def judge_flags(source, parent):
    differ, own, gone = parents.compare_flags(source, FILES[parent].read_text())
    told = [f"{name} {a} ({b})" for name, (a, b) in sorted(differ.items()) if name != "exp_name"]
    rows = []
    if told:
        seen = f"{', '.join(told)}; its tests run with the parent's"
        rows.append(Row("file", "other defaults", "changed", seen))
    if own:
        rows.append(Row("file", "flags of its own", "changed", ", ".join(own)))
    if gone:
        rows.append(Row("file", "flags that are gone", "untested", ", ".join(gone)))
    return rows


def judge_race(file, parent, folder):
    """Speed, profile and a short training run, compared with the parent."""
    default = parents.read_defaults(FILES[parent].read_text())["env_id"][0]
    task = race.choose_task(parent, ast.literal_eval(default))
    pairs = race.race(file, FILES[parent], folder, task)
    for run in pairs["copy"]:
        if run.folder is None:
            why = processes.why(run.output, 1)[:200]
            return [Row("speed", f"trains on {task}", "broken", why)]
    rows = [judge_speed(task, pairs), judge_profile(pairs)]
    for seed, run in enumerate(pairs["copy"], 1):
        rows.append(judge_training(f"{task}, seed {seed}", run, parent))
    return rows


def judge_speed(task, pairs):
    own = [race.speed(run.steps) for run in pairs["copy"]]
    theirs = [race.speed(run.steps) for run in pairs["parent"]]
    rounds = [(a, b) for a, b in zip(own, theirs, strict=True) if a and b]
    if not rounds:
        return Row("speed", f"on {task}", "skipped", "too few steps to measure")
    ratios = [a / b for a, b in rounds]
    told = " and ".join(f"{a:.0f}" for a, _ in rounds)
    told_theirs = " and ".join(f"{b:.0f}" for _, b in rounds)
    mean = math.prod(ratios) ** (1 / len(ratios))
    seen = f"{mean:.2f} times its parent ({told} steps/s, parent {told_theirs})"
    return Row("speed", f"on {task}", "slow" if max(ratios) < SLOW else "ok", seen)


def judge_profile(pairs):
    own, theirs = (race.shares_of([r.profile for r in pairs[side]]) for side in ("copy", "parent"))
    told = [f"{part} {share:.0%} ({theirs.get(part, 0):.0%})" for part, share in own.items()]
    return Row("profile", "share of the time (parent)", "ok", ", ".join(told))


def judge_training(what, run, parent):
    place = place_run(run.folder, parent)
    verdicts = {"inside": "ok", "above": "ok", "early": "skipped", "unknown": "skipped"}
    return Row("training", what, verdicts.get(place.verdict, place.verdict), place.line)


def print_table(console, rows):
    width = min(60, max(len(row.what) for row in rows))
    indent = width + 13  # of the last column, which is wrapped in a terminal
    room = max(30, console.width - indent) if console.is_terminal else sys.maxsize
    part = None
    for row in rows:
        if row.part != part:
            part = row.part
            console.print(f"\n{part}", style="bold")
        what = row.what if len(row.what) <= width else row.what[: width - 1] + "…"
        line = Text(f"  {what.ljust(width)}  ")
        line.append(row.verdict.ljust(9), style=COLORS.get(row.verdict, "bold red"))
        seen = textwrap.wrap(row.seen, room)
        line.append("  " + f"\n{' ' * indent}".join(seen))
        line.rstrip()
        console.print(line)


def to_markdown(name, parent, rows, summary):
    lines = [f"# {name}.py, a copy of {parent}.py", "", summary, ""]
    lines += ["| | | verdict | |", "|---|---|---|---|"]
    for row in rows:
        cells = (row.part, row.what, row.verdict, row.seen)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def say_where_a_run_lies(folder, against):
    if not Path(folder).is_dir():
        raise SystemExit(f"there is no folder {folder}")
    with errors.explain(f"read {folder}/run.json"):
        name = Path(runs.read_run(folder)["file"]).name
        stem = against or Path(name).stem
        copy = Path(folder, name)
        if not read_bands(stem) and copy.is_file() and FILES:
            stem, _ = parents.find_parent(parents.read_source(copy), against)
        place = place_run(folder, Path(stem).stem)
    print(f"{Path(folder).name}: {place.line}")
    sys.exit(place.verdict in BAD)


def main(args):
    start = time.time()
    if args.run:
        say_where_a_run_lies(args.run, args.against)
    if not args.file:
        raise SystemExit("name a file to check, or a run folder with --run")
    errors.need("pytest")
    if not (ROOT / "tests" / "conftest.py").exists():
        raise SystemExit("check runs in a checkout of CleanRL: there is no tests/ beside this tool")
    file = Path(args.file).resolve()
    source = parents.read_source(args.file)
    parent, share = parents.find_parent(source, args.against)
    details = parents.list_details(parent, source, args.changed)
    if not parents.find_tests(parent):
        raise SystemExit(f"there are no tests of {parent}.py")
    print(f"{args.file} is based on cleanrl/{parent}.py: {share:.0%} of the lines are the same")
    with tempfile.TemporaryDirectory(prefix="check-") as folder:
        folder = Path(folder)
        compile_once(folder / "jax")
        copy = prepare(source, parent, folder)
        records = run_tests(copy, file.parent, folder, args.only)
        if not records:
            raise SystemExit(f"no test's name contains {args.only!r}")
        rows = [Row("file", f"cleanrl/{parent}.py", "ok", f"{share:.0%} of the lines")]
        rows += judge_flags(source, parent) + judge_details(details, records, source)
        rows += judge_others(details, records)
        if not args.quick:
            rows += judge_race(file, parent, folder / "race")
    rows.sort(key=lambda row: ORDER.index(row.part))
    bad = [row for row in rows if row.verdict in BAD]
    counts = f"{len(bad)} of {len(rows)} lines" if bad else "nothing"
    seconds = round(time.time() - start)
    summary = f"{counts} broken, {seconds} s"
    console = Console(highlight=False, soft_wrap=True, markup=False)
    print_table(console, rows)
    console.print(f"\n{summary}", style="bold")
    for row in bad:
        console.print(f"  {row.what}: {row.verdict}: {row.seen}")
    report = {"file": file.stem, "parent": parent}
    report |= {"seconds": seconds, "cpu_seconds": cpu_seconds()}
    report["rows"] = [asdict(row) for row in rows]
    report["tests"] = [{name: record[name] for name in TEST} for record in records]
    write_report(args.output, report, to_markdown(file.stem, parent, rows, summary))
    sys.exit(bool(bad))


def cpu_seconds():
    """CPU time of all processes that this one waited for."""
    times = os.times()
    return round(times.children_user + times.children_system)


def write_report(folder, report, text):
    name = report["file"]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.md").write_text(text, encoding="utf-8")
        (folder / f"{name}.json").write_text(json.dumps(report, indent=1) + "\n")
    except OSError as error:
        raise SystemExit(f"cannot write {folder}: {error.strerror}") from None


if __name__ == "__main__":
    main(tyro.cli(Args, prog="python -m cleanrl_utils.check", description=check.__doc__))
