"""`kvoffload advise`: says in at most five sentences what other sizes and settings would bring, and how sure that is.

The numbers are metrics, from a server's page or from the last sample in a journal. Dashboards, `kvoffload top` and
reports show the same metrics.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import log2
from pathlib import Path
from typing import TYPE_CHECKING

from kvoffload.cli.exits import CommandError, Exit
from kvoffload.cli.top import LOST, SAVED, Reading, Server, page_url, predicted
from kvoffload.model.config import AUTO, size_text
from kvoffload.model.wire import Tier
from kvoffload.telemetry.catalogue import CAPACITIES, POLICIES, TierSizes

if TYPE_CHECKING:
    from kvoffload.cli.figures import Account
    from kvoffload.cli.journal_lines import Lines

HELP = "say what another size or setting would bring"

_SCHEMA = 1
_WORTH = 0.02  # a doubling of a tier should find this share of prompt tokens more
_LITTLE = 0.005  # a smaller tier that finds this share less is enough
_LEAST_REUSE = 0.05  # below this share of loads per store, eager stores are too many
_SHORT_S = 600.0
_UNSURE = 0.05  # predictions that may be off by this share, or are off by it today, are not to be trusted
_DOUBLINGS = (2.0, 4.0, 8.0)


@dataclass(frozen=True, slots=True)
class Sentence:
    """One piece of advice.

    Args:
        about: what the sentence is about: host, disk, stores, so_far or trust.
        text: the sentence.
        numbers: the numbers in the sentence; shares are between 0 and 1.
    """

    about: str
    text: str
    numbers: Mapping[str, float]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    words = "a server's metrics (URL, HOST:PORT, or a PORT of this machine), or the file that an engine wrote to `journal_path`"
    parser.add_argument("source", metavar="URL|JOURNAL", help=words)
    parser.add_argument("--json", action="store_true", help="print the sentences and their numbers as JSON")


def run(args: argparse.Namespace) -> int:
    """Print the advice for each engine. Return 1 if a part of a journal is missing.

    Raises:
        KVOffloadError: the source is neither a metrics page nor a journal.
    """
    from kvoffload.cli.journal_lines import Lines

    # A pipe is a journal too, such as that of `zcat`; a folder may have the name of a server.
    is_journal = os.path.exists(args.source) and not os.path.isdir(args.source)
    lines = Lines(Path(args.source)) if is_journal else None
    readings = _scraped(args.source) if lines is None else _read(lines)
    engines = {name: advise(reading) for name, reading in readings.items()}
    if args.json:
        plain = [{"engine": name, "advice": list(map(asdict, found))} for name, found in engines.items()]
        print(json.dumps({"schema": _SCHEMA, "kind": "advice", "engines": plain}, indent=2))
    else:
        for name, found in engines.items():
            if len(engines) > 1:
                print(f"Engine {name}:")
            print("\n".join(sentence.text for sentence in found))
    return Exit.OK if lines is None else lines.report_missing()


def _read(lines: Lines) -> dict[str, Reading]:
    from kvoffload.cli.figures import add_up

    return {"": reading_of(add_up(lines))}


def _scraped(source: str) -> dict[str, Reading]:
    try:
        server = Server(page_url(source))
    except CommandError as error:
        raise CommandError(f"{error}, nor an existing file") from error
    server.scrape()
    if server.problem:
        hint = "" if "://" in source else f"; a file {source} does not exist or cannot be looked up either"
        raise CommandError(f"{server.url}: {server.problem}{hint}")
    return server.now


def reading_of(account: Account) -> Reading:
    """Return the metrics at a journal's end."""
    from kvoffload.cli.figures import LARGEST
    from kvoffload.telemetry.capacity import labels_of
    from kvoffload.telemetry.catalogue import BY_NAME

    reading = Reading(0.0)
    for name, series in account.counted.counts.items():
        names = BY_NAME[name].label_names
        reading.samples[name] = [
            (dict(zip(names, labels, strict=True)), min(number, LARGEST)) for labels, number in series.items()
        ]
    for key, value in account.sampled.items():
        name, labels = labels_of(key)
        reading.samples.setdefault(name, []).append((labels, min(value, LARGEST)))
    return reading


# -- the sentences ------------------------------------------------------------------------------------------------


def advise(reading: Reading) -> list[Sentence]:
    """Return the advice that an engine's metrics allow."""
    sentences = _host(reading), _disk(reading), _stores(reading), _so_far(reading), _trust(reading)
    return [sentence for sentence in sentences if sentence is not None]


def _host(reading: Reading) -> Sentence | None:
    found = predicted(reading, TierSizes.HOST)
    what = "host memory, not counting the disk," if _tier_bytes(reading, Tier.DISK) else "host memory"
    return _resize(reading, "host", what, found, _tier_bytes(reading, Tier.HOST))


def _disk(reading: Reading) -> Sentence | None:
    found = predicted(reading, TierSizes.HOST_AND_DISK)
    if size := _tier_bytes(reading, Tier.DISK):
        return _resize(reading, "disk", "disk", found, size)
    host, today = _tier_bytes(reading, Tier.HOST), predicted(reading, TierSizes.HOST)[1]
    if not host or not any(found.values()):
        return None
    most = max(found.values())
    times = min(times for times in found if found[times] >= most - _LITTLE)
    gain = found[times] - today
    numbers = {"bytes": times * host, "predicted": found[times], "today": today, "gain": gain}
    if gain < _WORTH:
        return Sentence("disk", f"A disk would find only {_points(gain)} more.", numbers)
    text = f"A disk of {size_text(times * host)} below today's host would find {_percent(found[times])} of prompt tokens, {_points(gain)} more"
    return Sentence(
        "disk", f"{text}{_prefill(reading, gain)}{_sure(reading, TierSizes.HOST_AND_DISK, times)}.", numbers
    )


def _resize(
    reading: Reading, about: str, what: str, found: Mapping[float, float], size: float
) -> Sentence | None:
    """Advise to enlarge a tier while each doubling finds more, to shrink it if that loses little, or neither."""
    today = found[1]
    if not size or not any(found.values()):
        return None
    worth = [
        times
        for times in _DOUBLINGS
        if found[times] - found[times / 2] >= _WORTH and found[times] - today >= _WORTH * log2(times)
    ]
    enough = [times for times in found if times < 1 and today - found[times] < _LITTLE]
    times = max(worth) if worth else min(enough, default=8.0)
    gain = found[times] - today
    numbers = {
        "bytes": times * size,
        "today_bytes": size,
        "predicted": found[times],
        "today": today,
        "gain": gain,
    }
    change = f"{size_text(times * size)} instead of {size_text(size)} of {what} would find"
    shares = f"{_percent(found[times])} of prompt tokens instead of {_percent(today)}"
    tiers = TierSizes.HOST if about == "host" else TierSizes.HOST_AND_DISK
    sure = _sure(reading, tiers, times)
    if worth:
        return Sentence(about, f"{change} {shares}{_prefill(reading, gain)}{sure}.", numbers)
    if enough:
        return Sentence(about, f"{change} nearly as much, {shares}{sure}.", numbers)
    return Sentence(about, f"Even {change} only {shares}{sure}.", numbers)


def _stores(reading: Reading) -> Sentence | None:
    stored = reading.total("kvoffload_store_blocks_total", outcome="stored")
    if not stored or stored < reading.total("kvoffload_capacity_slots", tier=Tier.HOST.value):
        return None  # the host has not been filled once
    reuse = reading.total("kvoffload_load_blocks_total", outcome="loaded") / stored
    text = f"For 100 stored blocks {100 * reuse:,.0f} were loaded again"
    found = {
        policy: reading.total("kvoffload_predicted_policy_hit_ratio", policy=policy) for policy in POLICIES
    }
    best = max(found, key=found.__getitem__)
    used = next(iter(reading.values("kvoffload_store_policy", "policy")), "")
    setting = next(iter(reading.values("kvoffload_info", "store_policy")), "")
    numbers = {"loads_per_store": reuse} | (found if any(found.values()) else {})
    if setting == AUTO and used:
        text += f"; store_policy auto stores by {used}"
    elif (
        used in found and found[best] - found[used] >= _WORTH
    ):  # an engine of a later version may use another
        shares = f"{best} would have found {_percent(found[best])}, {used} {_percent(found[used])}"
        text += f"; of the recent prompts' blocks {shares}: set store_policy to auto"
    elif not any(found.values()) and reuse < _LEAST_REUSE and setting == "eager":
        text += ": set store_policy to lazy"
    return Sentence("stores", f"{text}.", numbers)


def _so_far(reading: Reading) -> Sentence | None:
    saved, cost = reading.total(SAVED), sum(map(reading.total, LOST))
    if not saved:
        return None
    written, read = (
        reading.total("kvoffload_transfer_bytes_total", tier=Tier.DISK.value, direction=way)
        for way in ("store", "load")
    )
    disk = f"; {size_text(written)} were written to the disk, {size_text(read)} read back" if written else ""
    text = f"So far loads have saved {_seconds(saved)} of prefill and cost {_seconds(cost)}, net {_seconds(saved - cost)}{disk}."
    return Sentence("so_far", text, {"saved_s": saved, "lost_s": cost, "written": written, "read": read})


def _seconds(seconds: float) -> str:
    return f"{seconds:,.1f} s" if abs(seconds) < 100 else f"{seconds:,.0f} s"


def _trust(reading: Reading) -> Sentence:
    seconds = reading.total("kvoffload_predicted_seconds")
    margin = reading.total("kvoffload_predicted_margin_ratio") if seconds else 1.0
    tiers = TierSizes.HOST_AND_DISK if _tier_bytes(reading, Tier.DISK) else TierSizes.HOST
    today, measured = predicted(reading, tiers)[1], _measured(reading)
    numbers = {"seconds": seconds, "margin": margin, "today": today, "measured": measured}
    doubts = [
        text
        for text, is_so in (
            ("offloading is off", bool(reading.values("kvoffload_degraded", "cause"))),
            ("there are no predictions yet", not seconds),
            (f"they rest on {_duration(seconds)} of traffic", 0 < seconds < _SHORT_S),
            (f"they may be off by {_points(margin)}", bool(seconds) and margin > _UNSURE),
            (
                f"{_percent(measured)} of prompt tokens were found, not {_percent(today)} as predicted for today's size",
                abs(today - measured) > _UNSURE,
            ),
        )
        if is_so
    ]
    if doubts:
        return Sentence("trust", f"Do not trust these numbers yet: {'; '.join(doubts)}.", numbers)
    text = f"These numbers rest on {_duration(seconds)} of traffic; {_percent(measured)} of prompt tokens were found, {_percent(today)} were predicted for today's size."
    return Sentence("trust", text, numbers)


# -- numbers ------------------------------------------------------------------------------------------------------


def _measured(reading: Reading) -> float:
    """Return the share of prompt tokens that the device, the host and the disk had."""
    name = "kvoffload_prompt_tokens_total"
    found = sum(reading.total(name, source=tier.value) for tier in (Tier.DEVICE, Tier.HOST, Tier.DISK))
    return found / max(reading.total(name), 1.0)


def _tier_bytes(reading: Reading, tier: Tier) -> float:
    slots = reading.total("kvoffload_capacity_slots", tier=tier.value)
    return slots * reading.total("kvoffload_slot_bytes", tier=tier.value)


def _prefill(reading: Reading, gain: float) -> str:
    """Return how much prefill a gain saves, as the end of a sentence."""
    rate = reading.total("kvoffload_prefill_tokens_per_second")
    tokens_per_s = gain * reading.total("kvoffload_predicted_prompt_tokens_per_second")
    return f", some {60 * tokens_per_s / rate:,.1f} seconds of prefill a minute" if rate else ""


def _sure(reading: Reading, tiers: TierSizes, times: float) -> str:
    """Return how sure a prediction is, as the end of a sentence."""
    (capacity,) = [name for name, each in CAPACITIES.items() if each == times]
    name = "kvoffload_predicted_unknown_ratio"
    unknown = reading.total(name, tiers=tiers.value, capacity=capacity)
    more = f"; up to {_points(unknown)} more once it has been filled" if unknown >= _WORTH else ""
    return f" (give or take {_points(reading.total('kvoffload_predicted_margin_ratio'))}{more})"


def _percent(share: float) -> str:
    return f"{share:.0%}".replace("%", " %")


def _points(share: float) -> str:
    return f"{100 * share:.1f} points"


def _duration(seconds: float) -> str:
    if seconds < 5400:
        return f"{seconds / 60:.0f} minutes"
    return f"{seconds / 3600:.0f} hours"
