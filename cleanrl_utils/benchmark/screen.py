"""What the benchmark prints while it runs: a live table on a terminal, elsewhere lines."""

import time
from collections import Counter

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from cleanrl_utils.benchmark import log

ORDER = ("running", "failed", "queued", "done")
COLOURS = {"running": "cyan", "failed": "red", "queued": "bright_black", "done": "green"}


def clock(seconds):
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def figures(run):
    """Return and steps per second of a run, in words, as far as they are known."""
    _, rate, episodic_return = run.figures
    words = [f"return {episodic_return:g}"] if episodic_return is not None else []
    return words + ([f"{rate:,.0f} steps/s"] if rate is not None else [])


class Screen:
    """A table redrawn every second; without a terminal, a line per change and per minute."""

    def __init__(self, runs):
        self.runs, self.start, self.shown = runs, time.time(), time.time()
        self.console = Console(highlight=False)
        self.live = None
        if self.console.is_terminal:
            self.live = Live(console=self.console, auto_refresh=False)
            self.live.start()

    def close(self):
        if self.live:
            self.live.stop()

    def tell(self, word, run, details=""):
        if not self.live:
            self.print(f"{word:<8}  {run.title}{details and ': '}{details}")

    def print(self, line):
        print(f"{time.strftime('%H:%M:%S')}  {line}", flush=True)

    def counts(self):
        counts = Counter(run.state for run in self.runs)
        states = ", ".join(f"{counts[state]} {state}" for state in ("queued", "running", "failed"))
        return f"{counts['done']} of {len(self.runs)} done, {states}"

    def show(self, now=False):
        if not now and time.time() < self.shown + (1 if self.live else 60):
            return
        self.shown = time.time()
        running = [run for run in self.runs if run.state == "running"]
        for run in running:
            run.figures = log.progress(run.log)
        if self.live:
            self.live.update(self.page(), refresh=True)
            return
        for run in running:
            self.tell("running", run, ", ".join([f"{run.figures[0] or 0:.0%}", *figures(run)]))
        self.print(self.counts())

    def page(self):
        """Why runs failed or wait, and the runs, active ones first: Live shows what fits."""
        head = Text(f"{self.counts()}   {clock(time.time() - self.start)}", style="bold")
        reasons = Counter(run.why for run in self.runs if run.why and run.state != "done")
        notes = [Text(f"{count} x {why}") for why, count in reasons.most_common(3)]
        runs = sorted(self.runs, key=lambda run: ORDER.index(run.state))
        return Group(head, *notes, make_table(runs[: self.console.height]))


def make_table(runs):
    """What tells the runs apart folds instead of being cut, so that no two rows look alike."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("state", no_wrap=True)
    table.add_column("run", overflow="fold")
    for name in ("steps", "return", "steps/s", "time"):
        table.add_column(name, justify="right", no_wrap=True)
    for run in runs:
        share, rate, episodic_return = run.figures
        seconds = time.time() - run.began if run.state == "running" else run.seconds
        attempt = f" (attempt {run.attempts})" if run.attempts > 1 else ""
        table.add_row(
            Text(run.state, style=COLOURS[run.state]),
            Text(run.title + attempt),
            f"{share:.0%}" if share is not None else "",
            f"{episodic_return:g}" if episodic_return is not None else "",
            f"{rate:,.0f}" if rate is not None else "",
            clock(seconds) if seconds is not None else "",
        )
    return table
