"""Is every unchanged file of cleanrl/ clean? cleanrl_utils.check on each, one after the other.

    python scripts/check_every_file.py              # all files, without speed and training
    python scripts/check_every_file.py dqn ppo      # these
    python scripts/check_every_file.py --table      # only write the table again

Keeps what check said in docs/check/every_file.json, and writes the table of docs/check.md.
"""

import json
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "check.md"
OUTPUT = ROOT / "docs" / "check" / "every_file.json"
START, END = "<!-- every file -->\n", "<!-- end of every file -->"


def check(stem):
    """What check --quick says of an unchanged file."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "cleanrl_utils.check", f"cleanrl/{stem}.py", "--quick"]
        done = subprocess.run(
            [*command, "--output", folder], cwd=ROOT, capture_output=True, text=True
        )
        print(f"{stem}: exit status {done.returncode}\n{done.stdout}{done.stderr}", flush=True)
        report = json.loads(Path(folder, f"{stem}.json").read_text())
    rows = report["rows"]
    told = {"lines": Counter(row["verdict"] for row in rows), "tests": len(report["tests"])}
    told["other"] = [row for row in rows if row["verdict"] not in ("ok", "skipped")]
    told["slowest"] = sorted(report["tests"], key=lambda test: -test["seconds"])[:5]
    return told | {name: report[name] for name in ("seconds", "cpu_seconds")}


def make_table(told):
    lines = ["| file | lines | ok | skipped | other | tests | CPU time |"]
    lines.append("|---|---|---|---|---|---|---|")
    for stem, one in sorted(told.items()):
        counts = Counter(one["lines"])
        cells = [f"`{stem}.py`", counts.total(), counts["ok"], counts["skipped"]]
        cells += [counts.total() - counts["ok"] - counts["skipped"], one["tests"]]
        lines.append(f"| {' | '.join(map(str, cells))} | {one['cpu_seconds']} s |")
    return "\n".join(lines) + "\n"


def main():
    told = json.loads(OUTPUT.read_text()) if OUTPUT.exists() else {}
    files = sorted(path.stem for path in (ROOT / "cleanrl").glob("*.py"))
    for stem in [] if sys.argv[1:] == ["--table"] else sys.argv[1:] or files:
        told[stem] = check(stem)
        OUTPUT.parent.mkdir(exist_ok=True)
        OUTPUT.write_text(json.dumps(told, indent=1, sort_keys=True) + "\n")
    before, _, rest = PAGE.read_text().partition(START)
    PAGE.write_text(f"{before}{START}\n{make_table(told)}\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    main()
