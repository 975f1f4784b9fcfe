/* Fails the Nth call that touches a folder, counted over all processes that preload this.
 *
 * NTH_CALL names a file that they all map (struct control), NTH_CALL_FOLDER the folder. A call counts
 * when its path, or the file that its descriptor is of, lies there. Nothing is counted while mode is 0.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

enum { CHANGES = 1, OPENS = 2, READS = 4, WRITES = 8, LIES = 16 };  /* kinds of calls */

static struct control {
    int kinds;  /* which count; 0: none */
    int error;  /* that the call returns; 0: it writes half */
    int wanted; /* the number of the call that fails, from 1 */
    int count;
    int failed;
} *control;
static const char *folder;
static size_t length;

__attribute__((constructor)) static void begin(void)
{
    const char *file = getenv("NTH_CALL");
    folder = getenv("NTH_CALL_FOLDER");
    int descriptor = file && folder ? open(file, O_RDWR | O_CLOEXEC) : -1;
    if (descriptor < 0)
        return;
    length = strlen(folder);
    void *page = mmap(NULL, sizeof *control, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    close(descriptor);
    control = page == MAP_FAILED ? NULL : page;
}

static int inside(int descriptor, const char *path)
{
    char link[64], target[4096];
    if (path && path[0] == '/')
        return strncmp(path, folder, length) == 0;
    if (descriptor < 0)
        return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    ssize_t size = readlink(link, target, sizeof target - 1);
    if (size < 0)
        return 0;
    target[size] = 0;
    return strncmp(target, folder, length) == 0;
}

/* Whether this call is the one; errno is set then. */
static int fails(int kind, int descriptor, const char *path)
{
    if (!control || !(control->kinds & kind))
        return 0;
    int before = errno, there = inside(descriptor, path);
    errno = before;
    if (!there || __sync_add_and_fetch(&control->count, 1) != control->wanted)
        return 0;
    control->failed = 1;
    errno = control->error;
    return 1;
}

#define NEXT(name) static __typeof__(name) *next; if (!next) next = dlsym(RTLD_NEXT, #name)
#define CALL(type, name, kind, descriptor, path, params, args)                                     \
    type name params                                                                               \
    {                                                                                              \
        NEXT(name);                                                                                \
        return fails(kind, descriptor, path) ? -1 : next args;                                     \
    }

CALL(int, fsync, CHANGES, fd, NULL, (int fd), (fd))
CALL(int, fdatasync, CHANGES, fd, NULL, (int fd), (fd))
CALL(int, ftruncate, CHANGES, fd, NULL, (int fd, off_t size), (fd, size))
CALL(int, ftruncate64, CHANGES, fd, NULL, (int fd, off64_t size), (fd, size))
CALL(int, fchmod, CHANGES, fd, NULL, (int fd, mode_t mode), (fd, mode))
CALL(int, fchown, CHANGES, fd, NULL, (int fd, uid_t user, gid_t group), (fd, user, group))
CALL(int, futimens, CHANGES, fd, NULL, (int fd, const struct timespec t[2]), (fd, t))
CALL(int, mkdir, CHANGES, -1, path, (const char *path, mode_t mode), (path, mode))
CALL(int, mkdirat, CHANGES, fd, path, (int fd, const char *path, mode_t mode), (fd, path, mode))
CALL(int, unlink, CHANGES, -1, path, (const char *path), (path))
CALL(int, unlinkat, CHANGES, fd, path, (int fd, const char *path, int flags), (fd, path, flags))
CALL(int, rename, CHANGES, -1, to, (const char *from, const char *to), (from, to))
CALL(int, renameat, CHANGES, two, to, (int one, const char *from, int two, const char *to),
     (one, from, two, to))
CALL(int, renameat2, CHANGES, two, to,
     (int one, const char *from, int two, const char *to, unsigned flags),
     (one, from, two, to, flags))
CALL(int, linkat, CHANGES, two, to,
     (int one, const char *from, int two, const char *to, int flags), (one, from, two, to, flags))
CALL(int, symlinkat, CHANGES, fd, path, (const char *text, int fd, const char *path),
     (text, fd, path))
CALL(int, fsetxattr, CHANGES, fd, NULL,
     (int fd, const char *name, const void *value, size_t size, int flags),
     (fd, name, value, size, flags))
CALL(int, fremovexattr, CHANGES, fd, NULL, (int fd, const char *name), (fd, name))
CALL(ssize_t, read, READS, fd, NULL, (int fd, void *data, size_t size), (fd, data, size))
CALL(ssize_t, pread64, READS, fd, NULL, (int fd, void *data, size_t size, off64_t at),
     (fd, data, size, at))

/* With LIES it says that all is durable, and does nothing. */
int syncfs(int fd)
{
    NEXT(syncfs);
    if (control && control->kinds & LIES && inside(fd, NULL)) {
        __sync_add_and_fetch(&control->count, 1);
        return 0;
    }
    return fails(CHANGES, fd, NULL) ? -1 : next(fd);
}

ssize_t write(int fd, const void *data, size_t size)
{
    NEXT(write);
    if (fails(WRITES, fd, NULL)) {
        if (control->error)
            return -1;
        size = size > 1 ? size / 2 : size;
    }
    return next(fd, data, size);
}

ssize_t pwrite64(int fd, const void *data, size_t size, off64_t at)
{
    NEXT(pwrite64);
    if (fails(WRITES, fd, NULL)) {
        if (control->error)
            return -1;
        size = size > 1 ? size / 2 : size;
    }
    return next(fd, data, size, at);
}

#define OPEN(name, params, descriptor, ...)                                                        \
    int name params                                                                                \
    {                                                                                              \
        NEXT(name);                                                                                \
        va_list rest;                                                                              \
        va_start(rest, flags);                                                                     \
        mode_t mode = (flags & O_CREAT) || (flags & O_TMPFILE) == O_TMPFILE                        \
            ? va_arg(rest, mode_t) : 0;                                                            \
        va_end(rest);                                                                              \
        int full = control && (control->error == ENOSPC);                                          \
        if ((!full || (flags & O_CREAT)) && fails(OPENS, descriptor, path))                        \
            return -1;                                                                             \
        return next(__VA_ARGS__, flags, mode);                                                     \
    }

OPEN(open, (const char *path, int flags, ...), -1, path)
OPEN(open64, (const char *path, int flags, ...), -1, path)
OPEN(openat, (int fd, const char *path, int flags, ...), fd, fd, path)
OPEN(openat64, (int fd, const char *path, int flags, ...), fd, fd, path)
