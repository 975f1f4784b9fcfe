// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
// The format guard. Attached to a cgroup v2 directory, the kernel calls it at every open of a
// device node by any process below it: 1 allows the open, 0 makes it fail with EPERM.
//
// A write open of a guarded block device passes only
//   1. for a named program that mounts, checks or grows a file system, or connects the device,
//   2. for a named program with a named command (luksOpen), and without a word that never passes (luksFormat),
//   3. for the first process that needs the device's lease, until it expires (found blank, or by an operator's word).
// With a scope, so is each device judged that is not the node's own: a disk that appears, from its first moment.
// Everything else is reported and, in mode enforce, refused. Reads, mknod, unmap: never touched.
// Nothing here waits, and nothing here needs the agent to be alive. It reads a task by the kernel's types (BTF).
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_core_read.h>

enum { MODE_OFF, MODE_DRY_RUN, MODE_ENFORCE };
enum { BY_LEASE, BY_NAME, BY_WORD, WOULD_DENY, DENIED, LOST, COUNTERS };
enum { ALLOWED = 1, NEVER, TAKES_VALUE };   // of a word: a command; one that never passes; an option before its value
#define NAME 16             // of a task, as the kernel keeps it
#define WORD 32             // of an argument that is looked up
#define PIECE 128           // bytes of an argument that are read at once
#define PIECES 64           // of a command line; a longer one passes no word
#define ARGS 256            // bytes of the command line kept for the report
#define SECOND 1000000000ull
#define TOLD 16             // denials of one caller on one device in a second that are reported
#define TOLD_OF_DEVICE 64   // of all callers on one device
#define S_IFMT 00170000
#define S_IFBLK 0060000
#define FMODE_WRITE 2
#define CANARY_MAJOR 4095   // no driver can have it: status opens such a node to prove the mode

struct mm_struct { unsigned long arg_start, arg_end; } __attribute__((preserve_access_index));
struct task_struct {
	struct task_struct *real_parent, *group_leader;
	struct mm_struct *mm;
	__u64 start_boottime;
	int tgid;
	char comm[NAME];
} __attribute__((preserve_access_index));

struct device { __u32 major, minor; };
// CLOCK_MONOTONIC; opens let pass; for the agent; how long the lease holds without a beat of an agent, 0: to its end
struct lease { __u64 until_ns, opens, diskseq, grace_ns; };
struct writer { __u64 started_ns, pid; };   // a process: its number may be another's later. Without a pid: everybody
struct backing_dev_info { char dev_name[64]; } __attribute__((preserve_access_index));
struct inode { __u16 i_mode; __u32 i_rdev; } __attribute__((preserve_access_index));
struct file { struct inode *f_inode; __u32 f_mode; } __attribute__((preserve_access_index));
struct bpf_iter_meta { struct seq_file *seq; } __attribute__((preserve_access_index));
struct bpf_iter__task_file {
	struct bpf_iter_meta *meta;
	struct task_struct *task;
	__u32 fd;
	struct file *file;
} __attribute__((preserve_access_index));
struct holder { struct device dev; struct writer process; };
struct word { char name[NAME], text[WORD]; };
struct caller { struct device dev; __u64 cgroup; char name[NAME]; };
struct heard { __u64 since_ns, told, held_back; };   // held_back: counted only, since it was first heard
struct event {
	__u64 time_ns, cgroup;
	__u32 pid, ppid, major, minor, mode, args_len;
	char name[NAME], parent[NAME], args[ARGS];
};

#define MAP(what, kind, k, v, n) struct { __uint(type, kind); __uint(max_entries, n); \
	__type(key, k); __type(value, v); } what SEC(".maps")
MAP(majors, BPF_MAP_TYPE_HASH, __u32, __u8, 4096);   // krbd without single_major: one a device
MAP(devices, BPF_MAP_TYPE_HASH, struct device, __u8, 4096);  // partitions, stacked
MAP(config, BPF_MAP_TYPE_ARRAY, __u32, __u32, 1);
MAP(scope, BPF_MAP_TYPE_ARRAY, __u32, __u32, 1);   // the mode for devices that are neither guarded nor own
MAP(own, BPF_MAP_TYPE_HASH, struct device, struct device, 4096);   // the node's own, each with its disk
MAP(leases, BPF_MAP_TYPE_HASH, struct device, struct lease, 4096);
MAP(writers, BPF_MAP_TYPE_HASH, struct device, struct writer, 4096);   // to whom the lease belongs
MAP(beats, BPF_MAP_TYPE_ARRAY, __u32, __u64, 1);   // when an agent was last alive
MAP(openers, BPF_MAP_TYPE_HASH, char[NAME], __u8, 128);
MAP(words, BPF_MAP_TYPE_HASH, struct word, __u8, 512);
MAP(connecting, BPF_MAP_TYPE_LRU_HASH, __u32, __u64, 1024);  // processes that passed by rule 2, and when
MAP(callers, BPF_MAP_TYPE_LRU_HASH, struct caller, struct heard, 1024);
MAP(counters, BPF_MAP_TYPE_PERCPU_ARRAY, __u32, __u64, COUNTERS);
struct { __uint(type, BPF_MAP_TYPE_RINGBUF); __uint(max_entries, 256 * 1024); } events SEC(".maps");

static __always_inline int count(__u32 which, int answer)
{
	__u64 *counter = bpf_map_lookup_elem(&counters, &which);

	if (counter)
		*counter += 1;
	return answer;
}

// Whether the named program's command is one that it may have: its first argument that is neither an option nor an
// option's value. All arguments are read, to the last: a word that never passes may stand behind the command.
static __always_inline int word_allowed(struct task_struct *task, const char *name)
{
	unsigned long from = BPF_CORE_READ(task, mm, arg_start);
	unsigned long end = BPF_CORE_READ(task, mm, arg_end);
	enum { SEEKS, SKIPS_VALUE, FOUND } state = SEEKS;   // the command
	int at, is_rest = 0, was_rest;
	struct word key = {};
	char text[PIECE];
	__u8 *known, kind;
	long size;

	__builtin_memcpy(key.name, name, NAME);
	for (at = 0; at < PIECES; at++, from += is_rest ? PIECE - 1 : size) {
		if (from >= end)
			return state == FOUND;
		size = bpf_probe_read_user_str(text, PIECE, (void *)from);
		if (size <= 0)
			return 0;
		was_rest = is_rest;
		is_rest = size == PIECE;   // or it ends here, and the rest is empty
		if (!at || was_rest)
			continue;
		kind = 0;
		if (size <= WORD) {
			__builtin_memset(key.text, 0, WORD);
			bpf_probe_read_user_str(key.text, WORD, (void *)from);
			known = bpf_map_lookup_elem(&words, &key);
			kind = known ? *known : 0;
		}
		if (kind == NEVER)
			return 0;
		if (state == SKIPS_VALUE) {
			state = SEEKS;
		} else if (state == SEEKS) {
			if (text[0] == '-' && text[1])
				state = kind == TAKES_VALUE ? SKIPS_VALUE : SEEKS;
			else if (kind == ALLOWED)
				state = FOUND;
			else
				return 0;
		}
	}
	return 0;
}

static __always_inline int is_within(struct heard *heard, __u64 now, __u64 most)
{
	int within = now - heard->since_ns >= SECOND;

	if (within) {
		heard->since_ns = now;
		heard->told = 0;
	}
	within = within || heard->told < most;
	__sync_fetch_and_add(within ? &heard->told : &heard->held_back, 1);
	return within;
}

// Whether to report this denial. One caller that tries again and again, or under a new name each time, must not
// fill the buffer, in which others would find no place. A caller without cgroup and name is the whole device.
static __always_inline int is_told(struct device *dev, const char *name)
{
	struct caller key = { .dev = *dev, .cgroup = bpf_get_current_cgroup_id() }, all = { .dev = *dev };
	struct heard fresh = { .since_ns = bpf_ktime_get_ns(), .told = 1 }, *heard, *whole;

	__builtin_memcpy(key.name, name, NAME);
	heard = bpf_map_lookup_elem(&callers, &key);
	if (heard && !is_within(heard, fresh.since_ns, TOLD))
		return 0;
	whole = bpf_map_lookup_elem(&callers, &all);
	if (whole && !is_within(whole, fresh.since_ns, TOLD_OF_DEVICE))
		return 0;
	if (!heard)
		bpf_map_update_elem(&callers, &key, &fresh, BPF_ANY);
	if (!whole)
		bpf_map_update_elem(&callers, &all, &fresh, BPF_ANY);
	return 1;
}

static __always_inline void report(struct device *dev, struct task_struct *task, char *name, __u32 mode)
{
	unsigned long from, size;
	struct event *e;

	if (!is_told(dev, name))
		return;
	e = bpf_ringbuf_reserve(&events, sizeof(*e), 0);
	if (!e)
		return (void)count(LOST, 0);
	e->time_ns = bpf_ktime_get_ns();
	e->cgroup = bpf_get_current_cgroup_id();
	e->pid = bpf_get_current_pid_tgid() >> 32;
	e->major = dev->major;
	e->minor = dev->minor;
	e->mode = mode;
	e->ppid = e->args_len = 0;
	__builtin_memcpy(e->name, name, NAME);
	__builtin_memset(e->parent, 0, NAME);
	from = BPF_CORE_READ(task, mm, arg_start);
	size = BPF_CORE_READ(task, mm, arg_end) - from;
	size = size > ARGS ? ARGS : size;
	e->ppid = BPF_CORE_READ(task, real_parent, tgid);
	bpf_probe_read_kernel(e->parent, NAME, BPF_CORE_READ(task, real_parent, comm));
	if (!bpf_probe_read_user(e->args, size, (void *)from))
		e->args_len = size;
	bpf_ringbuf_submit(e, 0);
}

// The first that asks gets the lease. Its threads are the same process, and so is what it executes; a child is another.
static __always_inline int is_writer(struct device *dev, struct task_struct *task)
{
	struct writer asks = { .pid = bpf_get_current_pid_tgid() >> 32 }, *first;

	BPF_CORE_READ_INTO(&asks.started_ns, task, group_leader, start_boottime);
	bpf_map_update_elem(&writers, dev, &asks, BPF_NOEXIST);
	first = bpf_map_lookup_elem(&writers, dev);
	return first && (!first->pid || (first->pid == asks.pid && first->started_ns == asks.started_ns));
}

// Whether the lease lets the task pass; no task: whoever passes anyway. Counts who passes while there is a lease: a
// named program may write, too. Asked last, for the verifier follows both answers through all that comes after.
static __always_inline int is_leased(struct device *dev, struct task_struct *task)
{
	struct lease *lease = bpf_map_lookup_elem(&leases, dev);
	__u64 now = bpf_ktime_get_ns(), *beat;
	__u32 zero = 0;

	if (!lease || now >= lease->until_ns)
		return 0;
	beat = bpf_map_lookup_elem(&beats, &zero);
	if ((lease->grace_ns && (!beat || now >= *beat + lease->grace_ns)) || (task && !is_writer(dev, task)))
		return 0;
	return __sync_fetch_and_add(&lease->opens, 1), 1;
}

// A new disk takes its number away from what had it. The numbers of that one's partitions stay, so they count only
// while their disk does: it has a place, and that names the disk itself. An empty place names nobody.
static __always_inline int is_own(struct device *dev)
{
	struct device *disk = bpf_map_lookup_elem(&own, dev), *same;

	same = disk ? bpf_map_lookup_elem(&own, disk) : 0;
	return same && same->major == disk->major && same->minor == disk->minor;
}

SEC("cgroup/dev") int nodeagent_guard(struct bpf_cgroup_dev_ctx *ctx)
{
	struct device dev = { .major = ctx->major, .minor = ctx->minor };
	struct task_struct *task;
	char name[NAME] = {};
	__u32 zero = 0, pid, *mode;
	__u64 now, guarded;

	if ((ctx->access_type & 0xffff) != BPF_DEVCG_DEV_BLOCK ||
	    !((ctx->access_type >> 16) & BPF_DEVCG_ACC_WRITE))
		return 1;
	mode = bpf_map_lookup_elem(&config, &zero);
	if (!mode || *mode == MODE_OFF)
		return 1;
	if (dev.major == CANARY_MAJOR)
		return *mode != MODE_ENFORCE;
	guarded = bpf_map_lookup_elem(&majors, &dev.major) || bpf_map_lookup_elem(&devices, &dev);
	if (!guarded) {
		mode = bpf_map_lookup_elem(&scope, &zero);
		if (!mode || *mode == MODE_OFF || is_own(&dev))
			return 1;
	}
	task = (struct task_struct *)bpf_get_current_task();
	BPF_CORE_READ_INTO(&name, task, comm);
	if (bpf_map_lookup_elem(&openers, name))
		return is_leased(&dev, 0), count(BY_NAME, 1);
	if (word_allowed(task, name)) {
		pid = bpf_get_current_pid_tgid() >> 32;
		now = bpf_ktime_get_ns();
		if (guarded)   // what lies on another one is judged by the scope, as that one is
			bpf_map_update_elem(&connecting, &pid, &now, BPF_ANY);
		return is_leased(&dev, 0), count(BY_WORD, 1);
	}
	if (is_leased(&dev, task))
		return count(BY_LEASE, 1);
	report(&dev, task, name, *mode);
	return *mode == MODE_ENFORCE ? count(DENIED, 0) : (is_leased(&dev, 0), count(WOULD_DENY, 1));
}

// A disk appears: what its number had was given to an earlier one. A disk made by a process that just opened a guarded
// one (cryptsetup luksOpen) lies on top of that; a minute later another process may have its pid. dev_name is "MAJOR:MINOR".
SEC("tp_btf/writeback_bdi_register") int nodeagent_disks(__u64 *ctx)
{
	struct backing_dev_info *disk = (void *)ctx[0];
	__u32 number[2] = {}, colons = 0, pid = bpf_get_current_pid_tgid() >> 32;
	char name[NAME] = {};
	__u64 *opened;
	__u8 yes = 1;
	int at;

	bpf_probe_read_kernel_str(name, sizeof(name), disk->dev_name);
	for (at = 0; at < NAME - 1 && colons < 2; at++) {
		if (name[at] == ':')
			colons++;
		else if (name[at] < '0' || name[at] > '9')
			break;
		else if (colons)
			number[1] = number[1] * 10 + (name[at] - '0');
		else
			number[0] = number[0] * 10 + (name[at] - '0');
	}
	if (colons != 1)
		return 0;
	bpf_map_delete_elem(&leases, number);
	bpf_map_delete_elem(&writers, number);
	bpf_map_delete_elem(&own, number);
	opened = bpf_map_lookup_elem(&connecting, &pid);
	if (opened && bpf_ktime_get_ns() - *opened < 60 * SECOND)
		bpf_map_update_elem(&devices, number, &yes, BPF_ANY);
	else
		bpf_map_delete_elem(&devices, number);
	return 0;
}

// Not attached: the agent reads from it who has which block device open for writing. The kernel calls it for each open
// file of each process, and asks no file system: a node of the device may lie in any mount namespace.
SEC("iter/task_file") int nodeagent_open(struct bpf_iter__task_file *ctx)
{
	struct task_struct *task = ctx->task;
	struct file *file = ctx->file;
	struct inode *inode;
	struct holder holder = {};

	if (!task || !file || !(file->f_mode & FMODE_WRITE))
		return 0;
	inode = file->f_inode;
	if ((inode->i_mode & S_IFMT) != S_IFBLK)
		return 0;
	holder.dev.major = inode->i_rdev >> 20;
	holder.dev.minor = inode->i_rdev & 0xfffff;
	holder.process.started_ns = task->group_leader->start_boottime;
	holder.process.pid = task->tgid;
	bpf_seq_write(ctx->meta->seq, &holder, sizeof(holder));
	return 0;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
