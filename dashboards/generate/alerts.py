"""Every alert: its rule, and the runbook's paragraph, which the alert carries too.

Rules keep the labels of their series: an alert is about one engine, and can be routed by namespace, pod or cluster.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import yaml

_HEAD = """# Written by `make dashboards` from generate/alerts.py; do not edit.
# critical: look now. warning: today. info: when there is time; nothing is broken.
# Set the external labels `kvoffload_runbook_url` and `grafana_url` in prometheus.yml, so that an alert links to your copies.
"""
_WHERE = "{{ or $labels.pod $labels.instance }}{{ with $labels.engine }}, engine {{ . }}{{ end }}"
_RUNBOOK = '{{ or $externalLabels.kvoffload_runbook_url "RUNBOOK.md" }}'
_GRAFANA = '{{ or $externalLabels.grafana_url "http://127.0.0.1:3000" }}'
# Ranks report their memory with the engine's steps: what an idle engine last reported may be old.
_STEPS = "and sum without (hook) (rate(kvoffload_hook_seconds_count[5m])) > 0"
_VARIABLES = ("namespace", "pod", "instance", "engine")


@dataclass(frozen=True, slots=True)
class Alert:
    """One alert.

    Args:
        name: of the rule, without its prefix.
        severity: critical, warning or info.
        expr: fires while it has a series.
        summary: what is wrong, without a full stop.
        description: the same with its numbers; the engine's name is put before it.
        runbook: what it means and what to do.
        board: the dashboard that shows it.
        wait: how long it must hold.
    """

    name: str
    severity: str
    expr: str
    summary: str
    description: str
    runbook: str
    board: str = "overview"
    wait: str = ""

    @property
    def full_name(self) -> str:
        """The name that Prometheus shows."""
        return f"KVOffload{self.name}"

    def to_rule(self) -> dict[str, object]:
        """Return it as Prometheus' file of rules holds it."""
        filters = "&".join(
            f"{{{{ with $labels.{name} }}}}var-{name}={{{{ urlquery . }}}}{{{{ end }}}}"
            for name in _VARIABLES
        )
        annotations = {
            "summary": self.summary,
            "description": f"{_WHERE}: {self.description}",
            "runbook": self.runbook,
            "runbook_url": f"{_RUNBOOK}#{self.full_name.lower()}",
            "dashboard_url": f"{_GRAFANA}/d/kvoffload-{self.board}?{filters}",
        }
        waits = {"for": self.wait} if self.wait else {}
        labels = {"severity": self.severity}
        return {
            "alert": self.full_name,
            "expr": self.expr,
            **waits,
            "labels": labels,
            "annotations": annotations,
        }


ALERTS = (
    Alert(
        "Degraded",
        "critical",
        "kvoffload_degraded > 0",
        "Offloading is off until the engine restarts",
        "offloading switched itself off ({{ $labels.cause }}); the engine recomputes every prompt.",
        "Offloading could no longer guarantee the KV it keeps. It let its open copies end and switched itself off; the engine "
        "goes on without it. No wrong KV was served. Keep the log line `offloading_off`: it names the cause and holds the last "
        "lines of the journal. With `transfer_dead`, first look for errors of the device or its driver on that rank. With "
        "`law_broken` or `handler_raised` it is a bug in kvoffload: report it with that log line. Restart the engine, when it "
        "suits you, to switch offloading on again.",
    ),
    Alert(
        "CorruptBlocks",
        "critical",
        'increase(kvoffload_evicted_blocks_total{tier="host", cause="corrupt"}[1h]) > 0',
        "Blocks in host memory changed",
        "{{ $value | humanize }} blocks did not match their checksum in the last hour.",
        "The bytes of a block differed from those that were stored. The checksum caught it after a load, the request recomputed "
        "its tokens, and the slot is quarantined. Only checked blocks can be caught: if `verify` is `sample`, set it to `full` "
        "until the cause is known. Look for memory errors of the machine (EDAC, `ras-mc-ctl`), for errors of the device "
        "(`nvidia-smi -q`, Xid), and for anything else that writes to the engine's memory. If it happens again after a restart, "
        "take the machine out of service.",
        "why",
    ),
    Alert(
        "LoadsFailing",
        "warning",
        "engine:kvoffload_load_blocks_failed:ratio_rate15m > 0.01",
        "Loads fail and their tokens are recomputed",
        "{{ $value | humanizePercentage }} of the blocks to load did not arrive.",
        "Each failed load costs its request the wait for the copy and then the computation. `Copies by outcome` in *Transfers* "
        "shows which kind: for failed copies, the log has the device's error; abandoned copies did not end within "
        "`transfer_timeout_s`; corrupt ones have an alert of their own. If the link is only slow, raise `transfer_timeout_s`. If "
        "the device reports errors, drain the instance and restart it.",
        "transfers",
        "5m",
    ),
    Alert(
        "StoresFailing",
        "warning",
        "engine:kvoffload_store_blocks_failed:ratio_rate15m > 0.05",
        "Stores fail, so blocks will be missing",
        "{{ $value | humanizePercentage }} of the copies to the host did not arrive.",
        "No request waits for a store, so requests are not slower now, but later lookups miss these blocks with the cause "
        "`store_failed`. The log names the device's error. Stores and loads share the link: look at the loads too, and proceed "
        "as for KVOffloadLoadsFailing.",
        "transfers",
        "5m",
    ),
    Alert(
        "JobsAbandoned",
        "warning",
        "sum without (direction) (increase(kvoffload_abandoned_jobs_total[15m])) > 0\n"
        "  or sum without (direction) (increase(kvoffload_written_off_blocks_total[15m])) > 0\n",
        "Copies do not end",
        "copies were abandoned after transfer_timeout_s, and their memory was written off.",
        "A copy did not end in time. Its host slots are never used again, and its device blocks only after the copy has ended, "
        "so that it cannot write over another request's data. A single case may be a pause of the machine (a suspended host, a "
        "debugger). Several mean that the device or its driver hangs: check the device, and restart the engine, which also "
        "frees the memory. `Slots by state, and the capacity` in *Why* shows what is lost.",
        "transfers",
    ),
    Alert(
        "CopiesStalled",
        "critical",
        "kvoffload_copies_stalled > 0",
        "Copies do not end, so no new copy starts",
        "too many copies were abandoned; nothing is stored or loaded until they end.",
        "Abandoned copies keep their device blocks until they end, because they could still write to them. To protect the device "
        "pool, no new copy starts while such copies hold more than an eighth of it (and belong to more than one job), or after "
        "three jobs in a row that did not end. Requests are computed as without offloading, in a device pool that is smaller by "
        "`Device blocks under abandoned copies` in *Transfers*. Copying resumes by itself when enough of them have ended. If it "
        "does not, the device or its driver hangs: check it, and restart the engine.",
        "transfers",
    ),
    Alert(
        "SlotsQuarantined",
        "warning",
        'sum without (state) (kvoffload_slots{tier="host", state="quarantined"}) > 0.05 * kvoffload_capacity_slots',
        "Host memory is lost to quarantine",
        "{{ $value | humanize }} slots are quarantined, over 5 % of the host's.",
        "Quarantined slots were corrupt or under a copy that never ended. They are not used again until the engine restarts. "
        "Their cause has an alert of its own (KVOffloadCorruptBlocks, KVOffloadJobsAbandoned): act on that first, then restart "
        "the engine to get the memory back.",
        "why",
        "10m",
    ),
    Alert(
        "NoCapacity",
        "warning",
        f'sum without (tier) (kvoffload_capacity_slots{{tier="host"}}) == 0\n  {_STEPS}\n',
        "No host memory is ready",
        "not every rank has host memory ready, so nothing can be stored.",
        "The capacity is the smallest number of slots that any rank has pinned. If it stays 0, at least one rank has pinned none: "
        "look in every rank's log for errors of pinning or allocation. Usual reasons are a container's memory limit below "
        "`host_bytes`, a low `ulimit -l`, or a machine that swaps. Lower `host_bytes` or raise the limit, and restart. "
        "`kvoffload doctor` checks these limits. Ranks report with the engine's steps, so an idle engine is left out.",
        "overview",
        "10m",
    ),
    Alert(
        "MemoryIncomplete",
        "warning",
        'sum without (state) (kvoffload_host_bytes{state="reserved"})\n'
        f'  < 0.99 * sum without (state) (kvoffload_host_bytes{{state="wanted"}})\n  {_STEPS}\n',
        "Less host memory is ready than was set",
        "only {{ $value | humanize1024 }}B of host memory are ready.",
        "Pinning has stopped early or is very slow. The log line `host_memory_refused` says why it stopped: usually the machine "
        "or the container has no more memory. The engine works with what is ready. Lower `host_bytes` to that size or raise the "
        "limit, and restart.",
        "overview",
        "30m",
    ),
    Alert(
        "AccountsWrong",
        "warning",
        "abs(sum without (state) (kvoffload_slots) - kvoffload_capacity_slots) > 0\n"
        "  or\n"
        'abs(sum without (result) (kvoffload_lookup_blocks_total{result="miss"})\n'
        "  - sum without (cause) (kvoffload_miss_blocks_total)) > 0\n",
        "Numbers contradict each other",
        "slots do not sum to the capacity, or misses not to their causes (difference {{ $value | humanize }}).",
        "These sums hold in every scrape. If they do not, either two servers are scraped as one instance (check the targets), or "
        "it is a bug in kvoffload: report it with the journal and a copy of the metrics page. What is served does not depend on "
        "counters.",
        "why",
        "5m",
    ),
    Alert(
        "PinHeldLong",
        "warning",
        "(time() - kvoffload_oldest_pin_timestamp_seconds) * (kvoffload_oldest_pin_timestamp_seconds > bool 0) > 600",
        "A hit has been pinned for long",
        "a hit has kept its slots for {{ $value | humanizeDuration }}.",
        "A lookup pinned blocks, and its request has neither been admitted nor ended since. If the engine is stuck or has a very "
        "long queue, this ends with it. If the engine is idle, it did not report the end of a request: report that with the "
        "engine's version. Pinned slots cannot be evicted, so many of them lead to misses with the cause `declined_host_full`.",
        "why",
        "5m",
    ),
    Alert(
        "JobStuck",
        "critical",
        "(time() - kvoffload_oldest_job_timestamp_seconds) * (kvoffload_oldest_job_timestamp_seconds > bool 0) > 300",
        "Copies run for minutes and are not abandoned",
        "a copy job has been running for {{ $value | humanizeDuration }}.",
        "The engine's next step abandons a copy that did not end within `transfer_timeout_s`. So either that is set to over five "
        "minutes, or the engine has work and does not step: its thread hangs. The log lines `held_too_long` come from another "
        "thread and say since when. See where the engine's process hangs (`py-spy dump`), check the device, and restart it.",
        "why",
        "5m",
    ),
    Alert(
        "ResetDrainsLong",
        "warning",
        "kvoffload_reset_draining_jobs > 0",
        "Copies from before a reset still run",
        "{{ $value | humanize }} jobs from before the last reset have not ended.",
        "Nothing that was computed before the reset can be found, and what these copies bring is dropped; only their memory is "
        "still in use. They should end, or be abandoned, within `transfer_timeout_s`. If they do neither, the engine does not "
        "step: see KVOffloadJobStuck. Wait with a weight update until both the engine's own reset and this one have returned "
        "true.",
        "overview",
        "5m",
    ),
    Alert(
        "HooksSlow",
        "warning",
        "engine:kvoffload_hook_seconds:rate5m > 0.05",
        "Offloading takes much of the engine's time",
        "the engine's thread spends {{ $value | humanizePercentage }} of its time in hooks.",
        "The hooks are on the engine's critical path and should take about 1 % of its time. `Hooks by kind` in *Transfers* shows "
        "which one is slow. If all are, other processes use the engine's cores: reserve cores for it. If it is `lookup` or "
        "`allocated`, prompts are very long for their block size. If it is `report`, copies are many and small: raise "
        "`min_load_tokens`. Compare with the tokens found: the price may be worth it.",
        "transfers",
        "10m",
    ),
    Alert(
        "LoadsQueue",
        "warning",
        'engine_direction:kvoffload_transfer_queue_seconds:p99_rate5m{tier="host", direction="load"} > 0.5',
        "Loads wait before they start",
        "the p99 of the time before a load's copy starts is {{ $value | humanizeDuration }}.",
        "Requests wait for their loads, so this adds to the time to first token. Loads wait for earlier work on the device, for "
        "each other, and for stores on the same link. `Bytes copied by direction` shows what fills the link. If stores do, "
        "`store_policy: lazy` moves fewer bytes. If loads do, there are more hits than the link can carry: raise "
        "`min_load_tokens`, so that short hits are computed instead.",
        "transfers",
        "10m",
    ),
    Alert(
        "EngineSurprises",
        "warning",
        "increase(kvoffload_engine_surprises_total[15m]) > 10",
        "The engine breaks the connector's contract",
        "{{ $labels.cause }}, {{ $value | humanize }} times in 15 minutes.",
        "Each of these calls was survived, at the cost of a hit or a store. Several a minute usually follow an upgrade of the "
        "engine that changed how it calls connectors: run `kvoffload doctor`, which compares versions, and report the cause with "
        "the engine's version. Going back to the earlier version is safe.",
        "overview",
        "15m",
    ),
    Alert(
        "ObserverRemoved",
        "warning",
        "increase(kvoffload_bus_removed_total[1h]) > 0",
        "An observer failed and was removed",
        "the observer {{ $labels.subscriber }} is off until the engine restarts.",
        "It is a bug in that observer; the log has its traceback: report it. The engine and offloading are not affected. If the "
        "observer is `counters`, these metrics no longer change, and the other alerts no longer work: restart soon.",
        "transfers",
    ),
    Alert(
        "EventsDropped",
        "info",
        "increase(kvoffload_bus_dropped_total[15m]) > 0",
        "An observer is too slow",
        "{{ $labels.subscriber }} missed {{ $value | humanize }} events in 15 minutes.",
        "The engine never waits for an observer: events that do not fit its feed are dropped and counted. So this observer's "
        "output is not complete; counters are. For `journal`, use a faster disk or switch its file off; for `log`, raise the "
        "level.",
        "transfers",
        "15m",
    ),
    Alert(
        "JournalStopped",
        "info",
        "increase(kvoffload_journal_write_errors_total[1h]) > 0",
        "The journal's file is no longer written",
        "a write error ended the journal's file.",
        "Most often the disk of `journal_path` is full; `journal_max_bytes` bounds what a journal takes. The journal in memory "
        "goes on, so error reports still contain it. Make room, and restart the engine, when it suits you, to write the file "
        "again.",
        "transfers",
    ),
    Alert(
        "HostTooSmall",
        "info",
        "sum without (cause) (engine_cause:kvoffload_miss_blocks:rate5m"
        '{cause=~"evicted|declined_host_full"})\n'
        "  > 0.05 * sum without (result) (rate(kvoffload_lookup_blocks_total[5m]))\n",
        "More host memory would bring more hits",
        "prompts come back after their blocks had to make room.",
        "Over 5 % of the looked-up blocks ended a hit because they had been evicted or had found no room; the blocks behind them "
        "could not be used either. Blocks that were declined before host memory was ready do not count. If the machine has "
        "memory to spare, raise `host_bytes` and compare the hit ratio a day later; if it has a fast disk, set `disk_path` and "
        "`disk_bytes`. If not, nothing is wrong: silence the alert.",
        "why",
        "30m",
    ),
    Alert(
        "NetNegative",
        "warning",
        "engine:kvoffload_net_benefit_seconds:rate15m < -0.01 and kvoffload_net_benefit_negative > 0",
        "Offloading costs more time than it saves",
        "{{ $value | humanize }} seconds per second are lost, by its own estimate.",
        "Waiting for loads, or steps that copies slow down, take longer than computing the loaded tokens would. `Seconds saved "
        "and lost` in the *Overview* shows which. If it is waiting, hits are too short or the link is too slow: set "
        "`min_load_tokens` to `auto`, which loads only what was measured to pay; `Break-even length` shows that length. If it is "
        "interference, `store_policy: lazy` copies less. The log lines `net_benefit_negative` and `net_benefit_positive` say when "
        "it began and ended. If it stays, switch offloading off on this server.",
        "overview",
        "15m",
    ),
    Alert(
        "NoBenefit",
        "info",
        "engine:kvoffload_lookup_tokens_hit:ratio_rate5m < 0.01\n"
        "  and sum without (tier, direction) "
        '(engine_direction:kvoffload_transfer_bytes:rate5m{tier="host", direction="store"}) > 0\n',
        "Blocks are stored and never found",
        "under 1 % of the tokens looked up were found, for two hours.",
        "Offloading costs something here and brings nothing. See `Lookups that missed, by cause` in *Why*. Mostly `never_seen`: "
        "prompts do not repeat; switch offloading off on this server, or use `store_policy: lazy`, which costs less. `evicted`: "
        "too little memory. Requests with the same prefix that go to different servers miss on each of them: route them by "
        "prefix.",
        "why",
        "2h",
    ),
    Alert(
        "DiskClosed",
        "warning",
        'sum without (state) (kvoffload_tier_state{tier="disk", state="closed"}) > 0',
        "The disk is left alone until the engine restarts",
        "its index cannot be read or written.",
        "The log line `disk_closed` says why: the folder is in use by another engine, the file system is full or read-only, or "
        "the disk fails. The engine goes on without it, as if only host memory were there. Nothing wrong can be served: what is "
        "on the disk is compared with its checksums whenever it is read. Mend the cause, and restart the engine when it suits "
        "you; it then finds what was indexed. After an engine's reset that this log line follows, the index was removed on "
        "purpose.",
        "disk",
    ),
    Alert(
        "DiskFailing",
        "warning",
        'sum without (state) (kvoffload_tier_state{tier="disk", state="failing"}) > 0\n'
        "  or\n"
        'sum without (direction, outcome) (increase(kvoffload_tier_blocks_total{tier="disk", '
        'outcome=~"failed|abandoned"}[15m])) > 0\n',
        "Reads or writes of the disk fail or hang",
        "copies between host and disk fail or do not return.",
        "Requests recompute what could not be read, and what could not be written is missed later. The log has the error: "
        "`disk_call_failed` with the system's words, or `disk_call_hangs` when a call did not return in `transfer_timeout_s`; "
        "then nothing is copied until it returns. After several errors in a row a rank writes `disk_stopped` and asks the disk "
        "no more. Look at `dmesg`, `smartctl -a` and the free space of the file system. With network storage, look at the "
        "network. Restart the engine to use a mended disk again.",
        "disk",
        "1m",
    ),
    Alert(
        "RemoteFailing",
        "warning",
        'sum without (state) (kvoffload_tier_state{tier="remote", state="failing"}) > 0\n'
        "  or\n"
        'sum without (state) (kvoffload_tier_state{tier="remote", state="opening"}) > 0\n',
        "The store that engines share is not reached",
        "the scheduler or a rank does not reach it, or its calls fail.",
        "Requests compute what they would have found there; nothing else is affected, and the store is tried again after 1 s, 2 s, "
        "and up to 60 s. The log line `remote_fails` has the reason, and `remote_works` says that it is over. Mooncake: look whether "
        "its master and its store nodes run, and whether the ports are reachable from the engine. S3: a status of 401 or 403 means "
        "that the credentials in the engine's environment are refused. `kvoffload doctor` tries the store from where it is run. A "
        "store that answers slowly: raise `remote_timeout_s`, which is also how long requests may wait for it.",
        "remote",
        "2m",
    ),
    Alert(
        "RemoteNotWritten",
        "warning",
        'sum without (outcome) (increase(kvoffload_tier_blocks_total{tier="remote", direction="store", outcome="failed"}[15m])) > 0\n'
        "  unless\n"
        'sum without (outcome) (increase(kvoffload_tier_blocks_total{tier="remote", direction="store", outcome="done"}[15m])) > 0\n',
        "The store that engines share takes no blocks",
        "no block was written to it in 15 minutes, and {{ $value | humanize }} were not.",
        "What is in the store is read as before; what engines compute now is not shared. The log line `remote_write_refused` has the "
        "reason: a status of 507, or Mooncake's code -200, says that the store is full; 403 that the credentials may only read. "
        "Without that line the store fails as a whole: see KVOffloadRemoteFailing.",
        "remote",
    ),
    Alert(
        "RemoteCorrupt",
        "warning",
        'increase(kvoffload_tier_blocks_total{tier="remote", direction="load", outcome="corrupt"}[1h]) > 0',
        "The shared store did not hold what was written",
        "{{ $value | humanize }} fetched blocks did not match their checksum, length or name in the last hour.",
        "Each value is compared with its own trailer on every rank before a request uses it; these did not match, and their blocks "
        "were recomputed. So nothing wrong was served. Either something else writes under these names (Mooncake has no "
        "authentication: look at who reaches its ports; S3: look at who may write to the prefix), or the store or the network "
        "changes bytes. If it goes on, give the engines another bucket, prefix or store, and keep the old one to look at.",
        "remote",
    ),
    Alert(
        "RemoteUntrue",
        "warning",
        "sum without (outcome) (rate(kvoffload_tier_blocks_total"
        '{tier="remote", direction="load", outcome="failed"}[15m]))\n'
        "  > 0.1 * sum without (outcome) (rate(kvoffload_tier_blocks_total"
        '{tier="remote", direction="load", outcome!="cancelled"}[15m]))\n',
        "The shared store does not deliver what it says it has",
        "over a tenth of the blocks fetched from the store did not come.",
        "What the store says is a hint: a block can be evicted before it is read, or lie on a node that is gone. Each costs its "
        "request a wait and then the computation. Mooncake: a node's death explains it for the first seconds; for longer, the store "
        "is too small for what is written and evicts what was just found: add nodes, or raise `share_after_hits`. S3: the "
        "bucket's rules on lifetime remove packs that are still used. Calls that fail without opening the breaker count too: "
        "the log has `remote_fails` and `remote_call_returned`.",
        "remote",
        "15m",
    ),
    Alert(
        "RemoteSlow",
        "info",
        "rate(kvoffload_remote_ask_seconds_sum[15m]) > 0.1 * rate(kvoffload_remote_ask_seconds_count[15m])",
        "The shared store answers slowly",
        "asking it takes more than 0.1 s on average.",
        "Each request that arrives waits for this answer, also where the store has nothing for it. `Prefill saved by the store` and "
        "`Time that requests wait for asking` on the dashboard say whether that is worth it. Mooncake answers within a few "
        "milliseconds: look at the master's load and the network. A bucket is listed at most once a second, which takes longer "
        "the more packs are new: raise `share_after_hits`, or use a bucket nearer to the engines.",
        "remote",
        "30m",
    ),
    Alert(
        "DiskCorrupt",
        "warning",
        'increase(kvoffload_evicted_blocks_total{tier="disk", cause="corrupt"}[1h]) > 0',
        "The disk did not hold what was written",
        "{{ $value | humanize }} blocks read from the disk were wrong or unreadable in the last hour.",
        "Each block is compared with the checksum of its write before any request uses it; these did not match, were removed from "
        "the index, and recomputed. A few just after the machine lost power are normal: their data had not reached the disk. "
        "Otherwise look for errors of the disk (`dmesg`, `smartctl -a`, bad memory of a controller) and for another program "
        "that writes to the folder. If it goes on, replace the disk.",
        "disk",
    ),
    Alert(
        "DiskNotOpened",
        "warning",
        f'sum without (tier, state) (kvoffload_tier_state{{tier="disk", state="opening"}}) > 0\n  {_STEPS}\n',
        "The disk is not open yet",
        "the disk has been opening for over 15 minutes.",
        "The disk opens when every rank has its slot file and the index was read. A rank that cannot make its file logs "
        "`disk_not_opened` with the reason: too little space, a folder that cannot be written, or a file that another engine "
        "uses. Without a snapshot's commit the weights are digested first, which takes as long as reading them once. "
        "`kvoffload doctor` checks space and folder before a start. The engine serves meanwhile; lookups miss with the cause "
        "`tier_opening`.",
        "disk",
        "15m",
    ),
    Alert(
        "DiskSlow",
        "info",
        'sum without (tier, direction) (rate(kvoffload_transfer_bytes_total{tier="disk", direction="load"}[15m]))\n'
        "  < 50e6 * sum without (tier, direction) "
        '(rate(kvoffload_transfer_seconds_sum{tier="disk", direction="load"}[15m]))\n',
        "The disk reads slowly",
        "while it reads, fetches bring less than 50 MB/s a rank.",
        "Requests wait for their fetches, so at this speed recomputing may be faster. `kvoffload bench disk` measures the disk "
        "alone on an idle machine, and `kvoffload doctor` says from how many tokens on a fetch pays at that speed. If the disk "
        "is slow by itself, it is too slow for this use: network storage and spinning disks are. If not, something else uses "
        "it, or spills fill it: raise `spill_after_hits`.",
        "disk",
        "30m",
    ),
)


def render_rules() -> str:
    """Return Prometheus' file of alerting rules."""
    groups = [{"name": "kvoffload_alerts", "rules": [alert.to_rule() for alert in ALERTS]}]
    dumper = type("Dumper", (yaml.SafeDumper,), {})
    yaml.add_representer(str, _represent, Dumper=dumper)
    return f"{_HEAD}{yaml.dump({'groups': groups}, Dumper=dumper, sort_keys=False, width=118, allow_unicode=True)}"


def render_runbook() -> str:
    """Return the runbook: a section for each alert."""
    return "\n".join(_sections())


def _sections() -> Iterator[str]:
    yield (
        "# Runbook\n\n"
        "What to do when one of kvoffload's alerts fires. Written by `make dashboards` from `generate/alerts.py`; the alerts\n"
        "carry the same paragraphs. In all of these cases the engine goes on: at worst it recomputes what it could have loaded.\n"
    )
    for alert in ALERTS:
        yield f"## {alert.full_name}\n\n*{alert.severity}*: {alert.summary}.\n\n{alert.runbook}\n"


def _represent(dumper: Any, text: str) -> object:  # noqa: ANN401  # the library has no types
    """Write expressions of several lines as they are."""
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)
