"""Alerts of the tiers below the host."""

from __future__ import annotations

from dashboards.generate.rules import STEPS, Alert

LOWER_TIER_ALERTS = (
    Alert(
        "DiskClosed",
        "warning",
        'sum without (state) (kvoffload_tier_state{tier="disk", state="closed"}) > 0',
        "The disk is left alone until the engine restarts",
        "its index cannot be read or written.",
        "The log line `disk_closed` says why: the folder is in use by another engine (`disk_in_use` said so a minute before), the "
        "file system is full or read-only, or the disk fails. The engine goes on without it, as if only host memory were there. Nothing wrong can be served: what is "
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
        f'sum without (tier, state) (kvoffload_tier_state{{tier="disk", state="opening"}}) > 0\n  {STEPS}\n',
        "The disk is not open yet",
        "the disk has been opening for over 15 minutes.",
        "The log line `tier_still_opening` names the stage that the disk is in. Identity of the weights: without a snapshot's commit "
        "they are digested, which takes as long as reading them once; `weights_wait` says that another engine of the machine "
        "does so. Lock of the folder: `disk_in_use` names the process that has it. Slot files of the ranks: a rank that "
        "cannot make its file logs `disk_not_opened` with the reason (too little space, a folder that cannot be written), and "
        "one whose file another process has locked logs `disk_in_use`. Index: the disk does not answer, look at `dmesg`. "
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
        "Requests wait for their fetches, so at this speed recomputing may be faster. `fio` with direct reads of 1 MiB measures the "
        "disk alone on an idle machine. If the disk is slow by itself, it is too slow for this use: network storage and spinning "
        "disks are. If not, something else uses it, or spills fill it: raise `spill_after_hits`.",
        "disk",
        "30m",
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
        "and up to 60 s. The log line `remote_fails` has the reason, and `remote_works` says that it is over. If `tier_still_opening` "
        "has the stage `identity of the weights`, these are still being digested and the store was not tried. Mooncake: look whether "
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
        "were recomputed. So nothing wrong was served. Engines of one model whose vLLM has chosen "
        "another attention backend, or another order of the cache's dimensions, find each other's blocks like this: start them "
        "alike. Otherwise either something else writes under these names (Mooncake has no "
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
        "the more packs are new: raise `share_after_hits`, or use a bucket nearer to the engines. In the first minutes of an engine "
        "each listing also reads up to 1,000 older packs.",
        "remote",
        "30m",
    ),
)
