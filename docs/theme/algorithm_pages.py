"""What is generated on the page of an algorithm file, from its source and from results/.

- the summary under the heading: labels, headline result, ways to read and run the file
- <!-- hyperparameters -->: a table of the flags in Args, beside the paper's values (papers.toml)
- each numbered detail as a line that opens
"""

import json
import re
import sys
import tomllib
from functools import cache
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "scripts"))
import build_results  # noqa: E402
import film_agents  # noqa: E402

FLAG = re.compile(r"^    (?P<name>\w+): (?P<type>[^=]+) = (?P<default>.+?)  # (?P<help>.+)$", re.M)
DETAIL = re.compile(r"^\d+\. \*\*.*?(?=^\d+\. \*\*|^\n(?! {3})|\Z)", re.M | re.S)
TAG = re.compile(r'\[line \d+\]\((?P<link>[^)\s]+) "(?P<family>[a-z][a-z0-9]*) (?P<number>\d+)"\)')
TEST = r"\[`test_\w+`\]\([^)]*\)"
GUARDS = re.compile(rf"\s*\(\[line \d+\]\([^)]*\),\s+(?P<tests>{TEST}(?:,\s+{TEST})*)\)")
PAPERS = tomllib.loads((ROOT / "docs" / "theme" / "papers.toml").read_text(encoding="utf-8"))
RANK = ["better", "reproduced", "on par", "inconclusive", "below", "no published number", "partial"]
WORDS = {  # of a file's name, and the label that each stands for
    "jax": "JAX",
    "atari": "Atari",
    "jaxtari": "Atari",
    "procgen": "Procgen",
    "lstm": "recurrent policy",
    "rnn": "recurrent policy",
    "envpool": "EnvPool",
    "multigpu": "several GPUs",
    "trxl": "Transformer-XL memory",
    "dict": "Dict observations",
    "continuous": "continuous actions",
    "simba": "continuous actions",
    "fast": "continuous actions",
    "multidiscrete": "MultiDiscrete actions",
    "ma": "multi-agent",
    "ippo": "multi-agent",
    "mappo": "multi-agent",
    "isaacgym": "GPU simulation",
}


def read_source(name):
    return (ROOT / "cleanrl" / f"{name}.py").read_text(encoding="utf-8")


# ---- hyperparameters ----


def read_flags(name):
    """Two lists of flags: those of every file, and those of this algorithm."""
    body = read_source(name).split("class Args:\n")[1].split("    def check")[0]
    shared, _, own = body.partition("\n\n")
    return [[match.groupdict() for match in FLAG.finditer(part)] for part in (shared, own)]


def flag_rows(flags, paper=None):
    told = " | paper" if paper else ""
    rows = [f"| flag | default{told} | meaning |", "|---|---|---|" + "---|" * bool(paper)]
    for flag in flags:
        name = "--" + flag["name"].replace("_", "-")
        default = flag["default"].replace("Path(__file__).stem", "the file's name")
        cells = [f"`{name}`", f"`{default}`" if default != "the file's name" else default]
        cells += [str(paper.get(flag["name"], ""))] if paper else []
        rows.append(f"| {' | '.join([*cells, flag['help'].replace('|', 'or')])} |")
    return "\n".join(rows)


def hyperparameters(name):
    shared, own = read_flags(name)
    paper = PAPERS.get(name, {})
    unknown = set(paper) - {"source"} - {flag["name"] for flag in own}
    if unknown:
        raise SystemExit(f"docs/theme/papers.toml: {name} has no flag {', '.join(sorted(unknown))}")
    told = f"\nThe paper's values: {paper['source']}.\n" if paper else ""
    return (
        "<article data-search-exclude markdown>\n\n"
        f"{flag_rows(own, paper)}\n{told}\n"
        '<details markdown>\n<summary markdown="span">Flags of every file</summary>\n\n'
        f"{flag_rows(shared)}\n\n</details>\n\n</article>"
    )


# ---- details ----


def fold_details(markdown):
    """Each item of a list of details becomes a line with its title that opens."""

    def fold(match):
        item, tag = match[0], TAG.search(match[0])
        title = re.match(r"\d+\. \*\*(.+?)\*\*", item, re.S)
        guards = GUARDS.search(item)
        if not (tag and guards):
            return item
        body = re.sub(r"^\d+\. ", "", item[: guards.start()] + item[guards.end() :])
        body = re.sub(r"^ {3,4}", "", body, flags=re.M).strip()
        words = re.sub(r"\s+", " ", title[1])
        if words.endswith("."):  # the line that opens has said it
            body = re.sub(r"^\*\*.+?\*\*\s*", "", body, flags=re.S)
        number = f"{tag['family']} {tag['number']}"
        line = tag["link"].rpartition("#L")[2]
        tests = re.sub(r"\s+", " ", guards["tests"])
        return (
            f'<details class="detail" id="{number.replace(" ", "-")}" markdown>\n'
            f'<summary markdown="span"><span class="number">{number}</span> {words.rstrip(".")} '
            f"[line {line}]({tag['link']}){{.line-link}}</summary>\n\n"
            f"{body}\n\nTest: {tests}\n\n</details>\n\n"
        )

    return DETAIL.sub(fold, markdown)


# ---- the summary ----


@cache
def results_of(name):
    """(folder, row of build_results.summarize) of a file's tables, the best known first."""
    found = []
    for folder in build_results.TABLES:
        if build_results.stem_of(folder) == name:
            found += [(folder, row) for row in build_results.summarize(folder)]
    return sorted(found, key=lambda item: RANK.index(item[1][-1]))


def labels(name):
    words = name.split("_")
    told = [label for word, label in WORDS.items() if word in words]
    told += [] if "JAX" in told else ["PyTorch"]
    on_policy = words[0] in ("ppo", "ppg", "rpo", "pqn", "ippo", "mappo")
    told += ["on-policy" if on_policy else "off-policy"]
    if not any("actions" in label for label in told):
        told.append("discrete actions")
    return sorted(dict.fromkeys(told))


def is_beside_a_peer(folder, row):
    """Whether a result is compared with another library, and not with CleanRL v1."""
    return row[0] in build_results.PLAN[folder].get("peer", {})


def headline(name):
    """The best known result in one sentence, and the status of all of the file's results."""
    rows = results_of(name)
    if "kind" in build_results.PLAN.get(name, {}):
        return "Rated against its own earlier agents.", "Elo ratings"
    if not rows:
        return "No published curves yet.", "not run"
    folder, (env_id, planned, finished, stopped, v1, status) = rows[0]
    of_v1 = [row[-1] for folder, row in rows if not is_beside_a_peer(folder, row)]
    reproduced = [status for status in of_v1 if status in ("better", "reproduced")]
    status = f"reproduced {len(reproduced)} of {len(of_v1)}" if reproduced else status
    steps = build_results.in_short(planned)
    if finished:
        values, _ = build_results.describe(list(finished.values()))
        of = "mean ± standard deviation of" if len(finished) > 1 else "return of"
        seeds = f"{len(finished)} seeds" if len(finished) > 1 else "one seed"
        told = f"**{env_id}: {values}** ({of} {seeds}, {steps} steps)"
    else:
        final, so_far = max(stopped.values(), key=lambda run: run[1])
        reached = build_results.in_short(so_far)
        told = f"**{env_id}: {final:.1f}** so far ({reached} of {steps} steps)"
    if v1 != "none":
        told += f"; {v1}" if is_beside_a_peer(folder, rows[0][1]) else f"; CleanRL v1: {v1}"
    return told + ".", status


@cache
def films():
    return json.loads(film_agents.DATA.read_text(encoding="utf-8"))


def summary(name, parent, markdown):
    """The page with its first film moved into a summary under the heading."""
    shown = [film for film, about in films().items() if about["file"] == f"{name}.py"]
    blocks = [film_agents.block(film) for film in shown]
    first = next((block for block in blocks if block in markdown), "")
    markdown = markdown.replace(first, "", 1) if first else markdown
    told, status = headline(name)
    marks = "".join(f'<span class="label">{label}</span>' for label in labels(name))
    marks += f'<span class="label status">{status}</span>'
    links = [f"[annotated code](../code/{name}.md)"]
    links += [f"[diff against {parent}.py](../diff/{name}.md)"] if parent else []
    tests = [path.stem for path in (ROOT / "tests").glob("test_*.py")]
    mine = max((stem for stem in tests if f"test_{name}".startswith(stem)), key=len)
    links += [f"[tests](../../tests/{mine}.py)"]
    folders = list(dict.fromkeys(folder for folder, _ in results_of(name)))
    links += [f"[data](../../results/{folders[0]})"] if folders else []
    scripts = [ROOT / "benchmark" / f"{stem}.sh" for stem in (name, *folders)]
    script = next((path for path in scripts if path.exists()), None)
    links += [f"[benchmark](../../benchmark/{script.name})"] if script else []
    links += [f"[raw file](../raw/cleanrl/{name}.py)"]
    card = "\n\n".join(
        [
            '<div class="card" markdown>\n<div markdown>',
            f'<p class="labels">{marks}</p>',
            f"{told} [All results](../results.md).",
            f"```bash\nuv run cleanrl/{name}.py\n```",
            f"{' · '.join(links)}",
            "</div>",
            first,
            "</div>",
        ]
    )
    heading, rest = markdown.split("\n", 1)
    return f"{heading}\n\n{card}\n{rest}"


# ---- what is known to be missing ----


def status_table():
    """How far the results of each file are; "reproduced 2 of 3" counts its environments."""
    stems = sorted(path.stem for path in (ROOT / "cleanrl").glob("*.py"))
    statuses = {name: headline(name)[1] for name in stems}
    rows = ["| results | files |", "|---|---|"]
    order = {"no published number": 1, "Elo ratings": 2, "partial": 3, "not run": 4}
    for status in sorted(set(statuses.values()), key=lambda x: (order.get(x, 0), x)):
        names = [name for name in stems if statuses[name] == status]
        told = ", ".join(f"[`{name}`](code/{name}.md)" for name in names)
        rows.append(f"| {status} ({len(names)}) | {told} |")
    return "\n".join(rows)


def count_mutations():
    files = (ROOT / "tests" / "mutations").glob("*.toml")
    return str(sum(len(tomllib.loads(file.read_text())["mutation"]) for file in files))


# ---- home ----


def state_of_atari():
    """In words: what most readers want to know first."""
    stems = [path.stem for path in (ROOT / "cleanrl").glob("*.py") if "_atari" in path.stem]
    reproduced = sum("reproduced" in headline(name)[1] for name in stems)
    told = f"Atari: {reproduced} of {len(stems)} files" if reproduced else "No Atari file yet"
    ours = f"[`ppo_atari.py`](rl-algorithms/ppo-atari.md) is {headline('ppo_atari')[1]}"
    return f"{told}; {ours}.".replace("is not run", "has not been run at full length")


def tiles():
    """Four figures from the data, each with the page that has the evidence."""
    judged = [
        row[-1]
        for folder in build_results.TABLES
        for row in build_results.summarize(folder)
        if row[-2] != "none" and row[-1] != "partial" and not is_beside_a_peer(folder, row)
    ]
    matched = sum(status in ("better", "reproduced") for status in judged)
    speed = json.loads((ROOT / "results" / "speed.json").read_text(encoding="utf-8"))
    (ppo,) = [told for told in speed if told["file"] == "ppo"]
    faster = median(build_results.ratios(ppo, "sb3"))
    paths = (ROOT / "results").glob("*/runs.json")
    ours = [path for path in paths if not path.parent.name.endswith("_peer")]
    runs = sum(len(json.loads(path.read_text(encoding="utf-8"))) for path in ours)
    told = {
        f"{matched} of {len(judged)}": "results with three seeds or more match or exceed "
        f"[v1's published number](results.md). {state_of_atari()}",
        f"{faster:.2f} times": "the throughput of Stable-Baselines3: "
        "[`ppo.py` on CartPole](speed.md)",
        f"{int(count_mutations()):,}": "mutations, each of which [a test must notice](trust.md)",
        f"{runs:,} runs": "published with [curve, flags, commit and versions](results.md)",
    }
    body = "\n\n".join(
        f'<div class="tile" markdown>\n**{figure}**\n\n{words}\n</div>'
        for figure, words in told.items()
    )
    return f'<div class="tiles" markdown>\n\n{body}\n\n</div>'


def cards():
    """The overviews, each with the still of a film."""
    told = [
        (
            "ppo_continuous_action__Hopper-v4",
            "on-policy",
            "On-policy",
            "PPO, RPO, PPG, RND: recurrent, multi-GPU, self-play",
        ),
        (
            "dqn__CartPole-v1",
            "off-policy-discrete",
            "Off-policy, discrete actions",
            "DQN, C51, QR-DQN, Rainbow, QDagger, PQN, SAC",
        ),
        (
            "ddpg_continuous_action__HalfCheetah-v4",
            "off-policy-continuous",
            "Off-policy, continuous actions",
            "DDPG, TD3, SAC, TQC, DroQ, CrossQ",
        ),
        (
            "ppo_continuous_action_jax__brax-ant",
            "jax-and-gpu",
            "JAX and GPU simulation",
            "gymnax, Brax, Playground, JAXtari, JaxMARL, Isaac Lab, mjlab",
        ),
    ]
    body = "\n\n".join(
        '<div class="tile" markdown>\n'
        f"[![{title}](rl-algorithms/videos/{still}.jpg){{ loading=lazy }}](rl-algorithms/{page}.md)"
        f"\n\n[**{title}**](rl-algorithms/{page}.md)\n\n{words}\n</div>"
        for still, page, title, words in told
    )
    return f'<div class="tiles" markdown>\n\n{body}\n\n</div>'
