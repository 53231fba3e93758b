"""A campaign: random sequences of what can happen to a run directory, and what is allowed to come of it.

A *world* is all that a run is made from: weights, data, settings, options, versions. A sequence kills runs, changes the
world, damages files, resumes, starts over and saves. After every step the directory is read, and after every run that
was not killed there are two permitted outcomes: a refusal (`PlotError`), or the very state that an undisturbed run of
the present world ends in. Anything else is written down as a failure with the sequence that led to it.

    python tests/disturbances.py 2000 2000     # how many runs, and the first seed of the sequences
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from plot_ot import localize
from plot_ot.errors import PlotError
from plot_ot.files.run_reading import read_run
from plot_ot.files.writing import plain
from plot_ot.result import Result
from plot_ot.studies.running import run_study
from tiny_task import TinyTask, causal_model, write_sources

SEEDS, METHODS = (1000, 1001), ("plot", "full/vector")
STEPS = 7
"""The most steps of one sequence."""
REAL_KILLS = 0.1
"""The share of kills that are SIGKILLs of a process of their own."""
CHANGES = ("os.rename", "os.remove", "os.mkdir", "os.truncate", "os.rmdir")


# -- kills ----------------------------------------------------------------------------------------------------


class Killed(BaseException):
    """Stands for SIGKILL inside a process: from here on nothing more is changed on disk."""


class _Guard:
    """Counts changes below a directory by an audit hook, and ends them at a chosen one."""

    def __init__(self) -> None:
        self.folder, self.left, self.act = "", -1, lambda: None
        sys.addaudithook(self._hook)

    def _hook(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.folder or (event != "open" and event not in CHANGES):
            return
        if event == "open" and not (isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)):
            return
        named = [os.fspath(a) for a in args[:2] if isinstance(a, (str, os.PathLike))]
        if any(str(name).startswith(self.folder) for name in named):
            if self.left <= 0:
                self.act()
            self.left -= 1

    @contextmanager
    def killing(self, folder: Path, at: int, act: Callable[[], None]) -> Iterator[None]:
        self.folder, self.left, self.act = str(folder), at, act
        try:
            yield
        finally:
            self.folder = ""


_guard: list[_Guard] = []


def _raise() -> None:
    raise Killed


def killed_in_process(work: Callable[[], object], folder: Path, at: int) -> bool:
    """Whether the work was stopped before its change number `at`; nothing that follows reaches the disk either."""
    if not _guard:
        _guard.append(_Guard())
    try:
        with _guard[0].killing(folder, at, _raise):
            work()
    except Killed:
        return True
    return False


def killed_for_real(work: Callable[[], object], folder: Path, at: int) -> bool:
    """The same in a fork that is ended by SIGKILL."""
    if not _guard:
        _guard.append(_Guard())
    if not (pid := os.fork()):
        try:
            with _guard[0].killing(folder, at, lambda: os.kill(os.getpid(), signal.SIGKILL)):
                work()
            os._exit(0)
        except PlotError:
            os._exit(2)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(70)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code == 2:
        raise PlotError("refused in its own process")
    assert code in (0, -signal.SIGKILL), code
    return code != 0


# -- what a run is made from, and how it ends undisturbed -----------------------------------------------------


@dataclass(frozen=True)
class World:
    weights: int = 0
    questions: int = 0
    settings: int = 0
    size: int = 12
    version: str = "1"

    def other(self, draw: random.Random) -> World:
        """One thing about it changed."""
        name = draw.choice(["weights", "questions", "settings", "size", "version"])
        values: dict[str, Any] = {"size": 26 - self.size, "version": "21"["12".index(self.version)]}
        return replace(self, **{name: values.get(name, 1 - getattr(self, name, 0) if name not in values else None)})


def asked(world: World, out: Path, cache: Path, seeds: tuple[int, ...], methods: tuple[str, ...], **how: Any) -> None:
    """Run the study of a world into a directory."""
    write_sources(cache, SEEDS, world.weights, world.questions)
    versions = {"plot_ot": world.version, "torch": torch.__version__}
    with mock.patch("plot_ot.studies.running.library_versions", return_value=versions):
        task = TinyTask(world.size, world.settings)
        run_study(task, seeds=seeds, methods=methods, out=out, cache=cache, controls="standard", **how)


def ending(out: Path) -> dict[str, Any]:
    """All that a finished run says, but for dates, durations and how it went."""
    results = json.loads((out / "results.json").read_text(encoding="utf-8"))
    manifest = json.loads((out / "manifest.json").read_text(encoding="utf-8"))
    config = {k: sorted(v) if isinstance(v, list) else v for k, v in manifest["config"].items()}
    return {
        **{k: v for k, v in results.items() if k not in ("runtimes", "seal", "couplings", "units")},
        "units": sorted(results["units"]),
        "there": sorted(str(p.relative_to(out)) for p in (out / "units").rglob("*.json")),
        "handles": {str(p.relative_to(out)): p.read_bytes() for p in sorted((out / "handles").rglob("*.safetensors"))},
        "plans": json.loads((out / "couplings.json").read_text(encoding="utf-8")),
        "manifest": [config, manifest["versions"], manifest["subjects"], manifest["format"]],
    }


def numbers(results: dict[str, Any]) -> dict[Any, Any]:
    """What a reader of a run would quote."""
    found = {}
    for r in results["records"]:
        found["accuracy", r["seed"], r["method"], r["variable"], r["bank"]] = r
    for r in results["selection"]:
        found["chosen", r["seed"], r["method"], r["variable"]] = r
    return found


# -- damage ---------------------------------------------------------------------------------------------------


def cut(draw: random.Random, path: Path) -> None:
    path.write_bytes(path.read_bytes()[: draw.randrange(max(1, path.stat().st_size))])


def flip(draw: random.Random, path: Path) -> None:
    data = bytearray(path.read_bytes())
    if data:
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        path.write_bytes(bytes(data))


def change_a_digit(draw: random.Random, path: Path) -> None:
    """A number that is still a number: nothing but its content tells."""
    data = bytearray(path.read_bytes())
    digits = [k for k, c in enumerate(data) if chr(c).isdigit()]
    if digits:
        at = draw.choice(digits)
        data[at] = ord("0") + (data[at] - ord("0") + draw.randint(1, 9)) % 10
        path.write_bytes(bytes(data))


def empty(draw: random.Random, path: Path) -> None:
    path.write_text(draw.choice(["", "{}", "[]", "null"]), encoding="utf-8")


def delete(draw: random.Random, path: Path) -> None:
    path.unlink()


DAMAGES = (cut, flip, change_a_digit, empty, delete)


def copy_from_another(draw: random.Random, path: Path, out: Path) -> None:
    """Put another file of the same kind in its place: of another seed, method or variable."""
    others = [p for p in out.rglob(f"*{path.suffix}") if p.parent.name.startswith("seed-") and p != path]
    if others:
        shutil.copy(draw.choice(others), path)


def copy_a_seed(draw: random.Random, out: Path) -> None:
    """The units (and perhaps handles) of one seed as those of another."""
    one, two = draw.sample([*SEEDS, 1002], 2)
    for kind in draw.choice([["units"], ["units", "handles"]]):
        if (out / kind / f"seed-{one}").is_dir():
            shutil.copytree(out / kind / f"seed-{one}", out / kind / f"seed-{two}", dirs_exist_ok=True)


def delete_handles(draw: random.Random, out: Path) -> None:
    shutil.rmtree(draw.choice([out / "handles", out / "handles" / f"seed-{SEEDS[0]}"]), ignore_errors=True)


def leave_litter(draw: random.Random, out: Path) -> None:
    """What a process that died leaves."""
    for folder in draw.sample([out, out / "units", out / "handles"], 2):
        if folder.is_dir():
            (folder / f".writing-{draw.randrange(1 << 30):x}").write_bytes(b"half of it")
    if (out / ".lock").exists():
        (out / ".lock").write_text('{"pid": 1, "host": "gone", "since": "yesterday"}', encoding="utf-8")


# -- sequences ------------------------------------------------------------------------------------------------


@dataclass
class Campaign:
    """Counts what happened, and keeps what should not have."""

    folder: Path
    counts: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    _clean: dict[Any, dict[str, Any]] = field(default_factory=dict)
    _results: dict[str, Result] = field(default_factory=dict)

    @property
    def runs(self) -> int:
        """Runs and saves, killed ones included."""
        return self.counts["runs"] + self.counts["saves"]

    def clean(self, world: World, seeds: tuple[int, ...], methods: tuple[str, ...]) -> dict[str, Any]:
        """How a run of a world ends when nobody disturbs it."""
        key = world, frozenset(seeds), frozenset(methods)
        if key not in self._clean:
            out = self.folder / "clean"
            shutil.rmtree(out, ignore_errors=True)
            asked(world, out, self.folder / "clean-cache", tuple(sorted(seeds)), methods)
            self._clean[key] = ending(out)
        return self._clean[key]

    def fail(self, why: str, story: list[str]) -> None:
        self.failures.append(f"{why} | {' > '.join(story)}")

    def read(self, out: Path, worlds: list[World], story: list[str]) -> None:
        """Whatever a reader shows must be what one undisturbed run of one world that was here says."""
        self.counts["readings"] += 1
        try:
            shown = numbers(read_run(out).results)
        except PlotError:
            return
        if not self.explained(shown, worlds):
            whole = [numbers(self.clean(w, SEEDS, METHODS)) for w in dict.fromkeys(worlds)]
            wrong = next((k for k, v in shown.items() if all(w.get(k) != v for w in whole)), "a mixture of worlds")
            self.fail(f"a reader shows what no run says: {wrong}", story)

    def explained(self, shown: dict[Any, Any], worlds: list[World]) -> bool:
        """Whether all numbers come from worlds that differ in nothing but settings, each method's from one of them.

        A method is a unit of its own: added to a run with settings that another method of it was not run with, both
        are what they say they are. Two settings of *one* method are a mixture.
        """
        for world in {replace(w, settings=0) for w in worlds}:
            alike = [numbers(self.clean(w, SEEDS, METHODS)) for w in set(worlds) if replace(w, settings=0) == world]
            own = [{k: v for k, v in shown.items() if k[2] == m} for m in {k[2] for k in shown}]
            if all(any(all(w.get(k) == v for k, v in part.items()) for w in alike) for part in own):
                return True
        return not shown

    def sequence(self, number: int) -> None:
        """One directory and what happens to it."""
        draw, story = random.Random(number), [f"sequence {number}"]
        out, cache = self.folder / "run", self.folder / "cache"
        shutil.rmtree(out, ignore_errors=True)
        world, worlds = World(), [World()]
        steps = draw.randint(2, STEPS)
        for step in range(steps + 1):
            last = step == steps
            usual = ["run"] * 3 + ["kill"] * 4 + ["world", "damage"] * 2 + ["odd"]
            what = "run" if last or not out.exists() else draw.choice(usual)
            if what == "world":
                world = worlds[0] if draw.random() < 0.4 else world.other(draw)
                story.append(f"{world}")
                self.counts["changes of the world"] += 1
            elif what == "damage":
                self.damage(draw, out, story)
            elif what == "odd":
                odd = draw.choice([copy_a_seed, delete_handles, leave_litter])
                odd(draw, out)
                story.append(odd.__name__)
                self.counts["damages"] += 1
            else:
                self.run(draw, out, cache, world, worlds, story, kill=what == "kill")
            if out.exists():
                self.read(out, worlds, story)

    def damage(self, draw: random.Random, out: Path, story: list[str]) -> None:
        there = sorted(p for p in out.rglob("*") if p.is_file() and "superseded" not in p.parts)
        if not there:
            return
        path = draw.choice(there)
        change = draw.choice([*DAMAGES, partial(copy_from_another, out=out)])
        change(draw, path)
        self.counts["damages"] += 1
        story.append(f"{getattr(change, '__name__', 'copy_from_another')} {path.relative_to(out)}")

    def run(
        self,
        draw: random.Random,
        out: Path,
        cache: Path,
        world: World,
        worlds: list[World],
        story: list[str],
        kill: bool,
    ) -> None:
        seeds = draw.choice([SEEDS, SEEDS, SEEDS[:1], SEEDS[1:]])
        methods = draw.choice([METHODS, METHODS, METHODS[:1], METHODS[1:]])
        over = draw.random() < 0.15 and out.exists()
        work = partial(asked, world, out, cache, seeds, methods, start_over=over)
        story.append(f"{'kill' if kill else 'run'} {seeds} {methods}{' over' if over else ''}")
        self.counts["runs"] += 1
        before = contents(out)
        how = self.attempt(draw, work, out, story, kill)
        damaged = any(s.split()[0] in DAMAGED for s in story)
        if how == "refused" and not damaged:
            if set(worlds) == {world}:
                self.fail("refused without a reason", story)
            if contents(out) != before:
                self.fail("refused, and changed", story)
        if how in ("ended", "killed"):
            worlds.append(world)
        if how != "ended":
            return
        config = json.loads((out / "manifest.json").read_text(encoding="utf-8"))["config"]
        expected = self.clean(world, tuple(config["seeds"]), tuple(config["methods"]))
        found = ending(out)
        there = {(int(p.split("seed-")[1].split("/")[0])) for p in found["there"]}
        grid = {(r["seed"], r["method"]) for r in found["records"]}
        full = {(s, m) for s in config["seeds"] for m in config["methods"]}
        asked_for, said = numbers(self.clean(world, SEEDS, METHODS)), numbers(found)
        apart = any(asked_for.get(k) != v for k, v in said.items())
        if not set(config["seeds"]) <= set(SEEDS) or not set(config["methods"]) <= set(METHODS):
            self.fail(f"a run of seeds and methods that nobody asked for: {config}", story)
        elif (
            apart
            and self.explained(said, worlds)
            and all(asked_for.get(k) == v for k, v in said.items() if k[2] in methods)
        ):
            self.counts["equal (methods with settings of their own)"] += 1
        elif full <= grid and found != expected:
            wrong = next(k for k in expected if found.get(k) != expected[k])
            self.fail(f"another end than a clean run's: {wrong}", story)
        elif not {(s, m) for s in seeds for m in methods} <= grid or not there <= set(SEEDS):
            self.fail("units that were asked for are missing", story)
        elif not full <= grid:
            whole = numbers(expected)
            if any(whole.get(k) != v for k, v in numbers(found).items()):
                self.fail("a part of a run that is not a part of a clean one", story)
            self.counts["equal (part of the grid)"] += 1
        else:
            self.counts["equal"] += 1

    def attempt(self, draw: random.Random, work: Callable[[], object], out: Path, story: list[str], kill: bool) -> str:
        """Do the work, perhaps killed on its way: whether it `ended`, was `killed` or `refused`, or was wrong."""
        try:
            if kill:
                stop = killed_for_real if draw.random() < REAL_KILLS else killed_in_process
                self.counts["real kills" if stop is killed_for_real else "simulated kills"] += 1
                if stop(work, out, draw.randint(0, 40)):
                    self.counts["ended by a kill"] += 1
                    return "killed"
            else:
                work()
        except PlotError as e:
            story.append(f"refused: {str(e)[:160]}")
            self.counts["refused"] += 1
            return "refused"
        except Exception as e:
            self.fail(f"{type(e).__name__}: {e} {traceback.format_exc()[-300:]}", story)
            return "wrong"
        story.append("ended")
        return "ended"

    # -- results that are saved ---------------------------------------------------------------------------

    def result(self, name: str) -> Result:
        """What `localize` found with one of two methods on one of two networks."""
        if not self._results:
            for key, weights, method in (("A", 0, "plot"), ("A more", 0, "full/vector"), ("B", 1, "plot")):
                write_sources(self.folder / "nets", SEEDS[:1], weights)
                task = TinyTask()
                prepared = task.prepare(SEEDS[0], self.folder / "nets")
                own = task.methods()[method]
                found = localize(prepared.subject, causal_model(), prepared.splits, method=own, progress=False)
                self._results[key] = found
        return self._results[name]

    def saves(self, number: int) -> None:
        """One directory that results are saved to again and again."""
        draw, story = random.Random(number), [f"saves {number}"]
        out, there, tried = self.folder / "saved", set[str](), set[str]()
        shutil.rmtree(out, ignore_errors=True)
        for step in range(draw.randint(2, STEPS)):
            what = draw.choice(["save"] * 2 + ["kill"] * 2 + ["damage"]) if step else "save"
            if what == "damage":
                self.damage(draw, out, story)
            else:
                name = draw.choice(["A", "A", "A more", "B"])
                story.append(f"{what} {name}")
                self.counts["saves"] += 1
                before = contents(out)
                how = self.attempt(draw, partial(self.result(name).save, out), out, story, what == "kill")
                tried |= {name} if how in ("ended", "killed") else set()
                if how == "refused" and not any(s.split()[0] in DAMAGED for s in story):
                    if len({n[0] for n in (*tried, name)}) == 1:
                        self.fail("refused without a reason", story)
                    if contents(out) != before:
                        self.fail("refused, and changed", story)
                if how == "ended":
                    there = {n for n in there if n[0] == name[0]} | {name}
                    self.counts["equal (saved)"] += 1
                    shown = numbers(read_run(out).results)
                    if any(shown.get(k) != v for k, v in self.expected_numbers(there).items()):
                        self.fail("saved, and not what was found", story)
            self.read_saved(out, story)

    def expected_numbers(self, names: set[str]) -> dict[Any, Any]:
        """What results of one network say together."""
        found: dict[Any, Any] = {}
        for name in names:
            result = self.result(name)
            parts = result.unit, result.controls
            found |= numbers(plain({k: [r for p in parts for r in p.get(k, [])] for k in ("records", "selection")}))
        return found

    def read_saved(self, out: Path, story: list[str]) -> None:
        """Whatever a reader shows must be of one network."""
        self.counts["readings"] += 1
        try:
            shown = numbers(read_run(out).results)
        except PlotError:
            return
        for network_name in ("A", "B"):
            names = {n for n in ("A", "A more", "B") if n[0] == network_name}
            whole = self.expected_numbers(names)
            if all(whole.get(k) == v for k, v in shown.items()):
                return
        self.fail("a reader shows what no result says", story)


DAMAGED = ("cut", "flip", "change_a_digit", "empty", "delete", "copy_from_another", "copy_a_seed", "delete_handles")
"""How steps begin after which a refusal needs no other reason."""


def contents(out: Path) -> dict[str, bytes]:
    """What a refusal must leave as it is."""
    there = [p for kind in ("units", "handles", "results.json") for p in (out / kind).rglob("*")]
    return {str(p): p.read_bytes() for p in [*there, out / "results.json"] if p.is_file() and ".writing-" not in p.name}


def campaign(runs: int, first: int, folder: Path, say: Callable[[str], None] = print) -> Campaign:
    """Sequences until there were so many runs."""
    found, number = Campaign(folder), first
    while found.runs < runs and len(found.failures) <= 20:
        found.saves(number) if number % 8 == 7 else found.sequence(number)
        number += 1
        if number % 50 == 0:
            say(
                f"{found.runs} runs in {number - first} sequences: {dict(found.counts)}, {len(found.failures)} failures"
            )
    return found


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    runs, first = int(sys.argv[1]), int(sys.argv[2])
    base = "/dev/shm" if os.path.isdir("/dev/shm") else None  # noqa: S108
    with tempfile.TemporaryDirectory(dir=base) as folder:
        found = campaign(runs, first, Path(folder), partial(print, flush=True))
    print(json.dumps({"counts": dict(found.counts), "failures": found.failures}, indent=1))
    sys.exit(bool(found.failures))


if __name__ == "__main__":
    main()
