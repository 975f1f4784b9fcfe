"""What each figure is, in plain words: the report and docs/bench.md show them beside the figure.

By the row's name; ``*`` stands for what differs between rows of one kind, like a release.
"""

import fnmatch

ROWS = {
    # cache view. Where there are two sides, ours stands first.
    "overlay_cold_8": "8 threads read small files from disk: dataset during the fill, plain copy",
    "overlay_hot_8": "8 threads read small files in memory: dataset during the fill, plain copy",
    "view_cold_1": "1 thread reads small files from disk: complete dataset, plain copy",
    "view_cold_8": "8 threads read small files from disk: complete dataset, plain copy",
    "view_hot_1": "1 thread reads small files in memory: complete dataset, plain copy",
    "view_hot_8": "8 threads read small files in memory: complete dataset, plain copy",
    "view_hot_vs_bindfs": "8 threads read small files in memory: complete dataset, bindfs",
    "view_hot_vs_rclone": "8 threads read small files in memory: complete dataset, rclone",
    # cache fill
    "fill_vs_cp": "20,000 CephFS files: fill, `cp -a`",
    "fill_vs_rclone": "20,000 CephFS files: fill, `rclone copy`",
    "fill_vs_read": "20,000 CephFS files: fill, reads that store nothing",
    "fill_vs_objects": "20,000 CephFS files: fill, reads of the objects that store nothing",
    "view_hot_vs_cephfuse": "8 threads read small files in memory: complete dataset, ceph-fuse",
    # cache rest
    "agent_memory_mib": "memory of all the agent's processes with 50,000 complete files",
    "agent_cpu_rest_percent": "CPU of the agent at rest",
    "agent_cpu_readers_percent": "CPU of the agent while jobs read",
    # rbd
    "*_fill_vs_export": "2 GiB image: fill, `rbd export`",
    "*_fill_vs_files": "2 GiB image: fill, `cp -a` from the mounted image",
    "*_fill_vs_reads": "2 GiB image: fill, reads that store nothing",
    "*_cpu": "CPU time of a fill for each GiB",
    "*_cold_vs_copy": "small files not in memory: complete copy, plain copy",
    "memory_growth_fill_process": "fill process: memory for a 20 GiB image above 1 GiB",
    "memory_growth_fill_agent": "agent during a fill: memory for a 20 GiB image above 1 GiB",
    "memory_growth_fill_all": "all processes in a fill: memory for a 20 GiB image above 1 GiB",
    "memory_growth_verify_process": "verify process: memory for a 20 GiB image above 1 GiB",
    "memory_growth_verify_all": "all processes in a verify: memory for a 20 GiB image above 1 GiB",
    # volumes
    "open_guarded_write": "guard's time: open guarded device to write",
    "open_guarded_read": "guard's time: open guarded device to read",
    "open_unguarded_read": "guard's time: open other block device to read",
    "open_character_write": "guard's time: open character device to write",
    "probe_blank": "probe of a blank 320 MiB device",
    "blank_lease_after": "from blank volume to permission to format",
    "blank_mounted_after": "from blank volume to mount by kubelet",
    # volume_audit
    "audit_false_findings": "false findings while mounts come and go",
    "audit_full_pass": "CPU time of a full pass",
    "audit_idle": "CPU of the audit at rest",
    "leak_found_after": "from unmount to finding of a leaked mount",
    "leak_freed_after": "from unmount to free device",
    "log_flood_stall": "agent's longest stall during a million log lines",
    # volume_scale
    "scale_loop_per_look": "stall of the agent for each look at 500 volumes and 5,000 mounts",
    "scale_uevent_to_verdict": "from a new device to its verdict, with 500 volumes",
    "scale_idle": "CPU of the agent at rest, with 500 volumes",
    "scale_rss": "memory of all the agent's processes, with 500 volumes",
    # kube_load: 200 clients, scaled
    "*_lists": "most lists of one kind by one agent",
    "start_*": "API server: 7,500 agents start",
    "rest_*": "API server: 7,500 agents at rest",
    "rollout_*": "API server: 7,500 agents get ten datasets",
    "change_*": "API server: ten datasets of 7,500 agents change",
    "restart_*": "API server: back for 7,500 agents after 50 s",
    "agent_memory": "memory of an agent that follows the cluster, all processes",
    # status
    "fill_while_asked": "fill: beside 1,000 status requests per second, undisturbed",
    "fill_beside_a_web_server": "fill: beside status requests, beside a plain web server",
    "status_p99": "99th percentile of the status answers",
    "status_memory": "memory that status requests add",
    # preheat, for each containerd release
    "heal_requests_*": "registry requests to restore a removed image",
    "heal_*": "time to restore a removed image, 99th percentile",
    "resume_*": "bytes that an interrupted pull fetches twice",
    "estimate_error_*": "error of the estimate of bytes to fetch",
    "cycle_*": "one turn of the loop at rest",
    "pull_vs_bare_*": "pull: agent, containerd alone",
    "ingest_vs_bare_*": "pull: agent with speed limit, containerd alone",
}


def of(row: str) -> str:
    """KeyError where nothing says what the row is. The first match counts."""
    for pattern, words in ROWS.items():
        if fnmatch.fnmatchcase(row, pattern):
            return words
    raise KeyError(f"tests/bench/words.py says nothing of the row {row!r}")
