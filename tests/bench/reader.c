/* What a training job does to a dataset, and nothing else: open, fstat, read, close, each file of
 * a list once in a pass, in an order shuffled by a seed, by N threads that share the list.
 *
 *   reader ROOT LIST THREADS SEED PASSES
 *
 * LIST holds paths relative to ROOT, each ended by a NUL. Files are opened relative to ROOT's
 * parent, so that the mount point itself is crossed at every open and two roots cost the same
 * number of components wherever they lie. Prints {"files":..,"bytes":..,"seconds":..}; the clock
 * runs from the moment all threads are ready until the last one ends. Any error ends it with 1. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <libgen.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { BUFFER = 1 << 20, MOST_THREADS = 256, TAKE = 16 };

static char **paths;
static long count, total, next_file, all_bytes;
static int parent;
static pthread_barrier_t ready;

static void die(const char *what) {
    fprintf(stderr, "reader: %s: %s\n", what, strerror(errno));
    _exit(1);
}

static long read_whole(const char *path, char *buffer) {
    struct stat status;
    long bytes = 0, got;
    int fd = openat(parent, path, O_RDONLY | O_CLOEXEC);
    if (fd < 0 || fstat(fd, &status) < 0) die(path);
    while ((got = read(fd, buffer, BUFFER)) > 0) bytes += got;
    if (got < 0) die(path);
    if (bytes != status.st_size) {
        fprintf(stderr, "reader: %s: %ld bytes of %ld\n", path, bytes, (long)status.st_size);
        _exit(1);
    }
    close(fd);
    return bytes;
}

static void *work(void *unused) {
    char *buffer = malloc(BUFFER);
    long bytes = 0, at;
    if (!buffer) die("malloc");
    pthread_barrier_wait(&ready);
    while ((at = __atomic_fetch_add(&next_file, TAKE, __ATOMIC_RELAXED)) < total)
        for (long i = at; i < at + TAKE && i < total; i++) bytes += read_whole(paths[i % count], buffer);
    __atomic_fetch_add(&all_bytes, bytes, __ATOMIC_RELAXED);
    free(buffer);
    return unused;
}

static uint64_t mixed(uint64_t *state) { /* splitmix64 */
    uint64_t z = (*state += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

static void load(const char *root, const char *list) {
    char *line = NULL;
    size_t room = 0;
    long have = 0;
    char *copy = strdup(root), *copy2 = strdup(root);
    const char *base = basename(copy);
    FILE *file = fopen(list, "r");
    parent = open(dirname(copy2), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (!file) die(list);
    if (parent < 0) die(root);
    while (getdelim(&line, &room, 0, file) > 0) {
        if (count == have && !(paths = realloc(paths, (have = have ? 2 * have : 4096) * sizeof *paths)))
            die("realloc");
        if (asprintf(&paths[count++], "%s/%s", base, line) < 0) die("asprintf");
    }
    free(line), free(copy), free(copy2);
    fclose(file);
    if (!count) { errno = ENODATA; die(list); }
}

int main(int argc, char **argv) {
    pthread_t threads[MOST_THREADS];
    struct timespec from, to;
    if (argc != 6) { fprintf(stderr, "reader ROOT LIST THREADS SEED PASSES\n"); return 2; }
    int wanted = atoi(argv[3]);
    if (wanted < 1 || wanted > MOST_THREADS) { errno = EINVAL; die(argv[3]); }
    load(argv[1], argv[2]);
    uint64_t state = strtoull(argv[4], NULL, 10);
    for (long i = count - 1; i > 0; i--) {
        long j = mixed(&state) % (i + 1);
        char *swapped = paths[i];
        paths[i] = paths[j], paths[j] = swapped;
    }
    total = count * atol(argv[5]);
    pthread_barrier_init(&ready, NULL, wanted + 1);
    for (int i = 0; i < wanted; i++)
        if ((errno = pthread_create(&threads[i], NULL, work, NULL))) die("pthread_create");
    clock_gettime(CLOCK_MONOTONIC, &from);
    pthread_barrier_wait(&ready);
    for (int i = 0; i < wanted; i++) pthread_join(threads[i], NULL);
    clock_gettime(CLOCK_MONOTONIC, &to);
    printf("{\"files\":%ld,\"bytes\":%ld,\"seconds\":%.6f}\n", total, all_bytes,
           (to.tv_sec - from.tv_sec) + (to.tv_nsec - from.tv_nsec) / 1e9);
    return 0;
}
