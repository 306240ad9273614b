"""`kvoffload advise`: says in at most five sentences what other sizes and settings would bring, and how sure that is.

The numbers are metrics, from a server's page or from the last sample in a journal. Dashboards, `kvoffload top` and
reports show the same metrics.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from math import log2
from pathlib import Path
from typing import TYPE_CHECKING

from kvoffload.cli.exits import CommandError, Exit
from kvoffload.cli.top import LOST, SAVED, UNSURE, Reading, Server, page_url, predicted, unknown
from kvoffload.model.config import AUTO, size_text
from kvoffload.model.wire import LOWER_TIERS, Tier
from kvoffload.telemetry.catalogue import POLICIES, HostBytes, TierSizes

if TYPE_CHECKING:
    from kvoffload.cli.figures import Account
    from kvoffload.cli.journal_lines import Lines

HELP = "say what another size or setting would bring"

_SCHEMA = 1
_WORTH = 0.02  # a doubling of a tier should find this share of prompt tokens more
_LITTLE = 0.005  # a smaller tier that finds this share less is enough
_LEAST_REUSE = 0.05  # below this share of loads per store, eager stores are too many
_SHORT_S = 600.0
_DOUBLINGS = (2.0, 4.0, 8.0)
_LARGEST = _DOUBLINGS[-1]


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
        raise CommandError(f"{error}; there is no such file either") from error
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
    ready, wanted = _growth(reading)
    if ready < wanted:
        text = f"Of the configured {size_text(wanted)} of host memory {size_text(ready)} are ready; other sizes are compared once all are."
        return Sentence("host", text, {"bytes": wanted, "today_bytes": ready})
    what = "host memory, not counting the disk," if _tier_bytes(reading, Tier.DISK) else "host memory"
    return _resize(reading, "host", what, TierSizes.HOST, _tier_bytes(reading, Tier.HOST))


def _disk(reading: Reading) -> Sentence | None:
    if size := _tier_bytes(reading, Tier.DISK):
        return _resize(reading, "disk", "disk", TierSizes.HOST_AND_DISK, size)
    ready, wanted = _growth(reading)
    host = _tier_bytes(reading, Tier.HOST)
    if not host or ready < wanted or not any(predicted(reading, TierSizes.HOST_AND_DISK).values()):
        return None
    return _new_disk(reading, host)


def _new_disk(reading: Reading, host: float) -> Sentence:
    """Advise the smallest disk that finds nearly as much as the largest one, if that is worth it."""
    found, lacking = (each(reading, TierSizes.HOST_AND_DISK) for each in (predicted, unknown))
    today = predicted(reading, TierSizes.HOST)[1]
    most = max(found.values())
    times = min(times for times in found if found[times] >= most - _LITTLE)
    gain = found[times] - today
    numbers = {"bytes": times * host, "predicted": found[times], "today": today, "gain": gain}
    if gain >= _WORTH:
        text = f"A disk of {size_text(times * host)} below today's host would find {_percent(found[times])} of prompt tokens, {_points(gain)} more{_prefill(reading, gain)}{_sure(reading, lacking[times])}."
    elif lacking[_LARGEST] >= UNSURE:
        text = f"Whether a disk would find more is not known yet: so far it would have found {_points(gain)} more, and {_more(lacking[_LARGEST])}."
    else:
        text = f"A disk would find only {_points(gain)} more."
    return Sentence("disk", text, numbers | {"unknown": lacking[times]})


def _growth(reading: Reading) -> tuple[float, float]:
    """Return how many bytes of host memory are ready, and how many are configured."""
    ready, wanted = (
        reading.total("kvoffload_host_bytes", state=state.value)
        for state in (HostBytes.RESERVED, HostBytes.WANTED)
    )
    return ready, wanted


def _resize(reading: Reading, about: str, what: str, tiers: TierSizes, size: float) -> Sentence | None:
    """Advise to enlarge a tier while each doubling finds more, to shrink it if that loses little, or neither.

    That a size finds no more than a smaller one is only said if the blocks of an earlier process would change little.
    """
    found, lacking = predicted(reading, tiers), unknown(reading, tiers)
    today = found[1]
    if not size or not any(found.values()):
        return None
    worth = [times for times in _DOUBLINGS if _is_worth(found, times)]
    enough = [times for times in found if times < 1 and today - found[times] < _LITTLE]
    times = max(worth) if worth else min(enough, default=_LARGEST)
    gain = found[times] - today
    numbers = {
        "bytes": times * size,
        "today_bytes": size,
        "predicted": found[times],
        "today": today,
        "gain": gain,
        "unknown": lacking[times],
    }
    small, large = min(times, 1.0), max(times, 1.0)
    if not worth and lacking[large] >= UNSURE:
        most = size_text(large * size)
        text = f"Whether {size_text(small * size)} of {what} would find as much as {most} is not known yet: so far {most} would have found {_percent(found[large])} of prompt tokens, and {_more(lacking[large])}."
        return Sentence(about, text, numbers)
    change = f"{size_text(times * size)} instead of {size_text(size)} of {what} would find"
    shares = f"{_percent(found[times])} of prompt tokens instead of {_percent(today)}"
    sure = _sure(reading, lacking[times])
    if worth:
        return Sentence(about, f"{change} {shares}{_prefill(reading, gain)}{sure}.", numbers)
    if enough:
        return Sentence(about, f"{change} nearly as much, {shares}{sure}.", numbers)
    return Sentence(about, f"Even {change} only {shares}{sure}.", numbers)


def _is_worth(found: Mapping[float, float], times: float) -> bool:
    """Return whether this multiple of today's size finds enough more than half of it, and than today's."""
    return found[times] - found[times / 2] >= _WORTH and found[times] - found[1] >= _WORTH * log2(times)


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
    # An engine of a later version may use a policy that is not compared.
    elif used in found and found[best] - found[used] >= _WORTH:
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
    today, measured = predicted(reading, tiers)[1], _found(reading, (Tier.DEVICE, Tier.HOST, Tier.DISK))
    others = _found(reading, [tier for tier in LOWER_TIERS if not tier.has_slots])
    numbers = {
        "seconds": seconds,
        "margin": margin,
        "today": today,
        "measured": measured,
        "others": others,
    }
    end = "."
    if others >= _WORTH:
        end = f"; another {_percent(others)} came from other engines' memory or the remote tier, and another size would find a part of it, too."
    doubts = [
        text
        for text, is_so in (
            ("offloading is off", bool(reading.values("kvoffload_degraded", "cause"))),
            ("there are no predictions yet", not seconds),
            (f"they rest on {_duration(seconds)} of traffic", 0 < seconds < _SHORT_S),
            (f"they may be off by {_points(margin)}", bool(seconds) and margin > UNSURE),
            (
                f"{_percent(measured)} of prompt tokens were found, not {_percent(today)} as predicted for today's size",
                abs(today - measured) > UNSURE,
            ),
        )
        if is_so
    ]
    if doubts:
        return Sentence("trust", f"Do not trust these numbers yet: {'; '.join(doubts)}{end}", numbers)
    text = f"These numbers rest on {_duration(seconds)} of traffic; {_percent(measured)} of prompt tokens were found, {_percent(today)} were predicted for today's size{end}"
    return Sentence("trust", text, numbers)


# -- numbers ------------------------------------------------------------------------------------------------------


def _found(reading: Reading, tiers: Iterable[Tier]) -> float:
    """Return the share of prompt tokens that these tiers had."""
    name = "kvoffload_prompt_tokens_total"
    found = sum(reading.total(name, source=tier.value) for tier in tiers)
    return found / max(reading.total(name), 1.0)


def _tier_bytes(reading: Reading, tier: Tier) -> float:
    slots = reading.total("kvoffload_capacity_slots", tier=tier.value)
    return slots * reading.total("kvoffload_slot_bytes", tier=tier.value)


def _prefill(reading: Reading, gain: float) -> str:
    """Return how much prefill a gain saves, as the end of a sentence."""
    rate = reading.total("kvoffload_prefill_tokens_per_second")
    tokens_per_s = gain * reading.total("kvoffload_predicted_prompt_tokens_per_second")
    return f", some {60 * tokens_per_s / rate:,.1f} seconds of prefill a minute" if rate else ""


def _sure(reading: Reading, lacking: float) -> str:
    """Return how sure a prediction is, as the end of a sentence.

    Args:
        reading: the engine's metrics.
        lacking: the share that might have been found in addition, had the tier been full at the start.
    """
    more = f"; {_more(lacking)}" if lacking >= _WORTH else ""
    return f" (give or take {_points(reading.total('kvoffload_predicted_margin_ratio'))}{more})"


def _more(lacking: float) -> str:
    return f"up to {_points(lacking)} more, if it had been full at the start"


def _percent(share: float) -> str:
    return f"{share:.0%}".replace("%", " %")


def _points(share: float) -> str:
    return f"{100 * share:.1f} points"


def _duration(seconds: float) -> str:
    if seconds < 5400:
        return f"{seconds / 60:.0f} minutes"
    return f"{seconds / 3600:.0f} hours"
