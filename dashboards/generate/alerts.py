"""Every alert, in the order of the runbook."""

from __future__ import annotations

from dashboards.generate.lower_tier_alerts import LOWER_TIER_ALERTS
from dashboards.generate.rules import STEPS, Alert

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
        f'sum without (tier) (kvoffload_capacity_slots{{tier="host"}}) == 0\n  {STEPS}\n',
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
        f'  < 0.99 * sum without (state) (kvoffload_host_bytes{{state="wanted"}})\n  {STEPS}\n',
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
    *LOWER_TIER_ALERTS,
)
