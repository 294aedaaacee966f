"""Rebuild the table and the chart of docs/speed.md from results/speed.json.

    python -m cleanrl_utils.speed ppo --json ppo_speed.json
    python scripts/build_speed.py ppo_speed.json    # replaces what was measured of that file
    python scripts/build_speed.py                   # only rebuilds the page

A ratio is taken within a round: our steps per second over the peer's. The table has the median of
the rounds, and their range.
"""

import json
import sys
from datetime import date
from pathlib import Path
from statistics import median

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).resolve().parent.parent
sys.path += [str(ROOT), str(ROOT / "scripts")]  # so that this runs from any folder
from build_results import ratios, write  # noqa: E402

DATA = ROOT / "results" / "speed.json"
PAGE = ROOT / "docs" / "speed.md"
CHART = ROOT / "docs" / "speed.png"
NAMES = {"sb3": "Stable-Baselines3", "sbx": "SBX", "rejax": "rejax", "bare": "bare environments"}


def read_measurement(path):
    """What `cleanrl_utils.speed --json` wrote, as an entry of results/speed.json."""
    told = json.loads(path.read_text(encoding="utf-8"))
    rounds = [
        {program: round(done["steps"] / done["seconds"], 1) for program, done in figures.items()}
        for figures in told["rounds"]
    ]
    return {
        "file": told["algorithm"],
        "env_id": told["settings"]["env_id"],
        "machine": f"{told['cores']} CPU cores, {told['machine']}",
        "date": date.today().isoformat(),
        "rounds": rounds,
    }


def replace(measurements, new):
    """The measurements with a new one in place of that of the same file."""
    others = [told for told in measurements if told["file"] != new["file"]]
    return sorted([*others, new], key=lambda told: told["file"])


def compare(measurements):
    """(file, environment, peer, ratios, our rates, date) of every peer."""
    for told in measurements:
        peers = [peer for peer in told["rounds"][0] if peer not in ("ours", "bare")]
        rates = [figures["ours"] for figures in told["rounds"]]
        for peer in peers:
            yield told, NAMES.get(peer, f"{peer}.py"), ratios(told, peer), rates


def table(measurements):
    lines = [
        "| file | environment | steps/s | against | times as fast (range) | rounds | measured |",
        "|---|---|---|---|---|---|---|",
    ]
    for told, peer, times, rates in compare(measurements):
        spread = f"{median(times):.2f} ({min(times):.2f} to {max(times):.2f})"
        when = told["date"] + (f", {told['version']}" if "version" in told else "")
        cells = [f"`{told['file']}.py`", told["env_id"], f"{median(rates):,.0f}", peer, spread]
        lines.append(f"| {' | '.join([*cells, str(len(times)), when])} |")
    return "\n".join(lines)


def draw(measurements, path):
    """The ratios to other libraries: the median as a bar, the range as a line."""
    rows = [row for row in compare(measurements) if not row[1].endswith(".py")]
    figure, axis = plt.subplots(figsize=(8, 0.42 * len(rows) + 1), layout="constrained")
    for place, (_, _, times, _) in enumerate(reversed(rows)):
        middle = median(times)
        axis.barh(place, middle, color="tab:blue", height=0.6)
        axis.plot([min(times), max(times)], [place, place], color="black", linewidth=1)
        axis.text(max(times) + 0.05, place, f"{middle:.2f}", va="center")
    names = [f"{told['file']}.py against {peer}" for told, peer, _, _ in reversed(rows)]
    axis.set_yticks(range(len(rows)), names)
    axis.set_xlim(0, 1.16 * max(max(times) for _, _, times, _ in rows))
    axis.axvline(1, color="black", linestyle="--", linewidth=0.9)
    axis.set_xlabel("times as fast in steps per second (dashed: equally fast)")
    figure.savefig(path, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    measurements = json.loads(DATA.read_text(encoding="utf-8"))
    for path in map(Path, sys.argv[1:]):
        measurements = replace(measurements, read_measurement(path))
    DATA.write_text(json.dumps(measurements, indent=1) + "\n", encoding="utf-8")
    write(PAGE, "speed", table(measurements))
    draw(measurements, CHART)
