"""Host memory in files that outlive their engine: who uses which folder, and which block each slot holds.

    host_path/                       on a tmpfs
        <kind>/                      engines of one kind: the same model, settings and ranks, as far as a start can tell
            claims                   locked while a process chooses a folder
            reset                    names the last reset of an engine of this kind
            0/, 1/, ...              a folder for each engine
                lock                 locked, shared, by all processes of the engine
                owner.json           the engine, its processes, and those of the engine before
                table                which block each slot holds; written by the scheduler's process
                rank0, rank1, ...    each rank's slots (`kvoffload.transfer.host_file`), or links to them on a hugetlbfs

The files need no sync and no checksums of bytes: a tmpfs dies with the machine, and what a killed process has written
to memory is there for all others. Engines of one kind read each other's tables and files. This package starts no threads.
"""
