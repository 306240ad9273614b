"""`make observe`: runs a demo, and evaluates the queries of all panels and rules in a real Prometheus.

Arguments of the form HOST:PORT name further engines to scrape. With `--no-demo`, Prometheus scrapes only these engines.
"""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import ExitStack

from dashboards.observe.checks import Finding, check_panels, check_rules, firing, wait_for_scrape
from dashboards.observe.demo import run_demo
from dashboards.observe.prometheus import ObserveError, run_prometheus
from kvoffload.cli import signals
from kvoffload.cli.exits import Exit
from kvoffload.remote.local import free_port

_SCRAPES = 5
"""How often to scrape engines if there is no demo. This is enough to see their rates."""


def main() -> int:
    """Check all queries, print the findings, and return the exit code."""
    parser = argparse.ArgumentParser(
        description="evaluate every query of every panel and rule in a real Prometheus"
    )
    parser.add_argument("targets", nargs="*", metavar="HOST:PORT", help="engines that serve /metrics already")
    parser.add_argument(
        "--no-demo", action="store_true", help="run no demo; the given engines must be at work"
    )
    args = parser.parse_args()
    if args.no_demo and not args.targets:
        parser.error("without the demo, name an engine")
    signals.handle()  # SIGTERM, too, is an exception, so that `with` blocks end their children
    try:
        findings = observe(args.targets, with_demo=not args.no_demo)
    except ObserveError as error:
        print(f"observe: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # all children have ended
        return signals.exit_code() or Exit.INTERRUPTED
    return report(findings)


def observe(targets: list[str], *, with_demo: bool = True) -> list[Finding]:
    """Scrape engines, evaluate all queries, and return a finding for each query.

    Args:
        targets: the addresses of running engines, as HOST:PORT.
        with_demo: whether to also run and scrape a demo.

    Raises:
        ObserveError: the demo or Prometheus fails.
    """
    with ExitStack() as stack:
        address = f"127.0.0.1:{free_port()}"
        scraped = [*targets, *([address] if with_demo else [])]
        prometheus = stack.enter_context(run_prometheus(scraped))
        start = time.time()
        demo = stack.enter_context(run_demo(address)) if with_demo else None
        for _ in range(1 if demo else _SCRAPES):
            wait_for_scrape(prometheus, scraped)
        if demo:
            demo.result()
        wait_for_scrape(prometheus, scraped)
        findings = [*check_panels(prometheus, start, time.time()), *check_rules(prometheus)]
        print(f"alerts that fire: {', '.join(firing(prometheus)) or 'none'}")
        return findings


def report(findings: list[Finding]) -> int:
    """Print all findings. Return 1 if any finding has a problem, otherwise 0."""
    for one in findings:
        state = "FAILED" if one.problem else "active" if one.is_active else "zero" if one.series else "empty"
        print(f"{state:7} {one.series:4} series  {one.where}")
        if one.problem:
            print(f"        {one.problem}\n        {one.expr}")
    failed = sum(1 for one in findings if one.problem)
    print(f"{len(findings)} queries, {failed} with a problem")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
