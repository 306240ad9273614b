"""`make mutants`: makes many small changes to the code, and lists the test that notices each change."""

from __future__ import annotations

import argparse
import ast
import hashlib
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from datetime import date
from functools import partial
from pathlib import Path

import msgspec

from tests.mutants.covering import Tests, record
from tests.mutants.generate import Mutant, sample
from tests.mutants.hunt import PYTEST, FromMemory, Trial, hunt, in_fork, prepare
from tests.mutants.table import Result, read, summary, written

_PACKAGES = ("core", "runtime", "transfer", "disk", "remote")
# Rules of the node's memory are noticed by whole engines and by the explorer.
_FURTHER = (
    "test_tier_cache",
    "explore/test_neighbours",
    "reference/test_neighbours",
    "reference/test_host_files",
)
_RULES = Path("tests/mutants/rules.py")


def main() -> int:
    """Try the mutants or the disabled rules. Return 1 if a rule was disabled and no test noticed it."""
    options = _parser().parse_args()
    options.keep.mkdir(parents=True, exist_ok=True)
    paths = sorted(
        path for folder in options.sources for path in folder.rglob("*.py") if path.name != "__init__.py"
    )
    prepare()
    tests = _measured(options, paths)
    print(f"{len(tests.chosen)} tests; {len(tests.left_out)} are slow, fail or start processes", flush=True)
    return _try_rules(tests, options.processes) if options.rules else _try_sample(options, paths, tests)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="make mutants", description=__doc__)
    option = parser.add_argument
    option("--number", type=int, default=1500, help="mutants, drawn from all (%(default)s)")
    option("--seed", type=int, default=1, help="of the draw; a smaller draw is the beginning of a larger one")
    option("--processes", type=int, default=os.cpu_count() or 1, help="mutants at a time (%(default)s)")
    option(
        "--all", action="store_true", help="run all tests of a mutant, not only up to the first that fails"
    )
    option(
        "--table", type=Path, metavar="FILE", help="go on from the results in this file, and write all to it"
    )
    option("--rules", action="store_true", help="instead of mutants, leave out one rule at a time")
    folders = [Path("kvoffload", name) for name in _PACKAGES]
    option("--sources", type=Path, nargs="+", default=folders, metavar="DIR", help="what is changed")
    folders = [Path("tests", name) for name in (*_PACKAGES, *[f"{name}.py" for name in _FURTHER])]
    option("--tests", type=Path, nargs="+", default=folders, metavar="DIR", help="what should notice")
    folder = Path(".venv/mutants")
    option("--keep", type=Path, default=folder, metavar="DIR", help="for results, which a later run reuses")
    return parser


def _measured(options: argparse.Namespace, paths: Sequence[Path]) -> Tests:
    """Return which tests run which line. If sources or tests have changed, run all tests to find out."""
    digest = _digest([*options.sources, *options.tests])
    file = options.keep / "tests.json"
    if file.exists() and (tests := msgspec.json.decode(file.read_bytes(), type=Tests)).digest == digest:
        return tests

    new = file.with_suffix(".new")

    def measure() -> None:
        # Without time limits: an alarm while coverage holds its lock would leave the lock taken.
        how = [*PYTEST, "--timeout=0", "-m", "not full and not gpu and not vllm"]
        arguments = [*how, *map(str, options.tests)]
        new.write_bytes(msgspec.json.encode(record(paths, arguments, digest)))

    in_fork(measure)
    tests = msgspec.json.decode(new.read_bytes(), type=Tests)
    no_change = Trial("no change", lambda: None, list(tests.seconds), tests.limit_s(tests.seconds))
    for _, verdict in hunt([no_change], 1, is_to_run_all=True):
        tests.left_out |= dict.fromkeys(verdict.by, "fails without a mutant")
    new.write_bytes(msgspec.json.encode(tests))
    return msgspec.json.decode(new.rename(file).read_bytes(), type=Tests)


def _digest(folders: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for path in sorted(
        path for each in folders for path in ([each] if each.is_file() else each.rglob("*.py"))
    ):
        source = path.read_bytes()
        digest.update(f"{path} {len(source)}\n".encode() + source)
    return digest.hexdigest()


# -- a sample ---------------------------------------------------------------------------------------------------------


def _try_sample(options: argparse.Namespace, paths: Iterable[Path], tests: Tests) -> int:
    chosen = sample(paths, options.seed, options.number)
    kept = options.keep / ("all-tests.jsonl" if options.all else "first-test.jsonl")
    results = {(result.key, result.digest): result for result in _known(options.table, kept, tests)}
    left = [mutant for mutant in chosen if (mutant.key, mutant.digest) not in results]
    try:
        with kept.open("ab", buffering=0) as file:
            for result in _results(left, tests, options):
                results[result.key, result.digest] = result
                file.write(msgspec.json.encode(result) + b"\n")
                if result.outcome in ("survived", "not run"):
                    print(result.outcome, result.place, result.change, sep="  ", flush=True)
    except KeyboardInterrupt:
        print("interrupted: the same command goes on")
    found = [results[name] for mutant in chosen if (name := (mutant.key, mutant.digest)) in results]
    print(*summary(found, tests.chosen, options.all), sep="\n")
    if options.table:
        title = f"{date.today()}, seed {options.seed}, {len(found)} of {len(chosen)} tried"
        options.table.write_text(written(found, title))
    return 0


def _known(table: Path | None, kept: Path, tests: Tests) -> Iterator[Result]:
    """Yield earlier results, except those whose tests no longer exist."""
    names = {*tests.seconds, *tests.left_out}
    found = list(read(table.read_text())) if table and table.exists() else []
    if kept.exists():
        found += [msgspec.json.decode(line, type=Result) for line in kept.read_bytes().splitlines()]
    return (result for result in found if not result.by or names & {*result.by})


def _results(mutants: Iterable[Mutant], tests: Tests, options: argparse.Namespace) -> Iterator[Result]:
    by_key, trials = {mutant.key: mutant for mutant in mutants}, list[Trial]()
    for mutant in by_key.values():
        if chosen := tests.of(mutant):
            trials.append(Trial(mutant.key, FromMemory(mutant).install, chosen, tests.limit_s(chosen)))
        else:
            yield Result(mutant.key, mutant.digest, mutant.lines[0], "not run")
    for trial, verdict in hunt(trials, options.processes, options.all):
        mutant = by_key[trial.name]
        how = verdict.outcome, verdict.by, len(trial.tests), verdict.seconds
        yield Result(mutant.key, mutant.digest, mutant.lines[0], *how)


# -- rules ------------------------------------------------------------------------------------------------------------


def _try_rules(tests: Tests, processes: int) -> int:
    """Disable one rule at a time. Run the tests that are named after the rule and, if none of them fails, all tests."""
    functions = [node for node in ast.parse(_RULES.read_text()).body if isinstance(node, ast.FunctionDef)]
    left = [function.name for function in functions if re.match(r"r\d+_", function.name)]
    for is_last in (False, True):
        trials = []
        for name in left:
            part = f"_{name.partition('_')[0]}_"
            if chosen := [test for test in tests.chosen if is_last or part in test]:
                trials.append(Trial(name, partial(_undo, name), chosen, tests.limit_s(chosen)))
        for trial, verdict in hunt(trials, processes):
            if verdict.outcome != "survived":
                left.remove(trial.name)
            elif not is_last:
                continue
            print(verdict.outcome, trial.name, *verdict.by, sep="  ", flush=True)
    return int(bool(left))


def _undo(name: str) -> None:
    # Import this in the forked process, because the parent must not import the project.
    from tests.mutants.rules import undo

    undo(name)


if __name__ == "__main__":
    sys.exit(main())
