/* Asks for one path so many times a second, and tells how long the answers took.
 *
 *     askers SOCKET PATH RATE
 *
 * Requests are due at fixed times, whether or not earlier ones were answered, and each one's time
 * counts from when it was due: an agent that stalls is not asked less for it. Connections are kept.
 * It is C so that it takes little of the processors that others need, too. SIGTERM ends it; it then
 * prints JSON: asked, failed, seconds, its own CPU seconds, and milliseconds of the median, the 99th
 * percentile and the slowest.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

enum { CONNECTIONS = 32, HEAD = 4096, MOST = 1 << 20 };
static const double ANSWER_SECONDS = 10.0, TICK_SECONDS = 0.005;

struct connection {
    int fd;
    double due; /* of the request that it waits for; 0 while it is free */
    size_t got; /* bytes of the head */
    long left;  /* bytes of the body that are to come; -1 while the head is not whole */
    char head[HEAD + 1];
};

static struct connection connections[CONNECTIONS];
static double took[MOST]; /* seconds */
static size_t answered, failed;
static volatile sig_atomic_t ended;
static char request[512];
static struct sockaddr_un place = {.sun_family = AF_UNIX};

static void end(int number) {
    (void)number;
    ended = 1;
}

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + time.tv_nsec / 1e9;
}

static void connect_again(struct connection *each) {
    if (each->fd > 0)
        close(each->fd);
    each->fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (each->fd < 0 || connect(each->fd, (struct sockaddr *)&place, sizeof place)) {
        perror("askers: connect");
        exit(1);
    }
    each->due = 0;
}

static void fail(struct connection *each) {
    failed++;
    connect_again(each);
}

static void ask(struct connection *each, double due) {
    size_t length = strlen(request);
    each->due = due, each->got = 0, each->left = -1;
    if (send(each->fd, request, length, MSG_NOSIGNAL) != (ssize_t)length)
        fail(each);
}

/* Takes what has come. One request is under way at a time, so all of it belongs to that. */
static void hear(struct connection *each) {
    static char data[1 << 16];
    ssize_t size = recv(each->fd, data, sizeof data, MSG_DONTWAIT);
    if (size < 0 && (errno == EAGAIN || errno == EINTR))
        return;
    if (size <= 0) {
        fail(each);
        return;
    }
    if (each->left < 0) {
        size_t part = (size_t)size < HEAD - each->got ? (size_t)size : HEAD - each->got;
        memcpy(each->head + each->got, data, part);
        each->got += part;
        each->head[each->got] = 0;
        char *body = strstr(each->head, "\r\n\r\n");
        if (!body) {
            if (each->got == HEAD)
                fail(each);
            return;
        }
        char *length = strcasestr(each->head, "\r\ncontent-length:");
        if (strncmp(each->head, "HTTP/1.1 200 ", 13) || !length || length > body) {
            fail(each);
            return;
        }
        size_t before = each->got - part; /* of the head, in earlier data */
        size_t head = (size_t)(body + 4 - each->head);
        each->left = atol(length + 17) - (size - (long)(head - before));
    } else {
        each->left -= size;
    }
    if (each->left < 0) {
        fail(each); /* more than was announced */
    } else if (each->left == 0) {
        if (answered < MOST)
            took[answered++] = now() - each->due;
        each->due = 0;
    }
}

static int shorter(const void *one, const void *other) {
    double a = *(const double *)one, b = *(const double *)other;
    return (a > b) - (a < b);
}

int main(int count, char **words) {
    if (count != 4 || strlen(words[1]) >= sizeof place.sun_path || strlen(words[2]) > 256) {
        fprintf(stderr, "usage: askers SOCKET PATH RATE\n");
        return 2;
    }
    strcpy(place.sun_path, words[1]);
    snprintf(request, sizeof request, "GET %s HTTP/1.1\r\nHost: agent\r\n\r\n", words[2]);
    double rate = atof(words[3]);
    signal(SIGTERM, end);
    for (int i = 0; i < CONNECTIONS; i++)
        connect_again(&connections[i]);

    double began = now(), last = began;
    size_t asked = 0;
    for (;;) {
        int waiting = 0;
        double at = now();
        struct pollfd polled[CONNECTIONS];
        for (int i = 0; i < CONNECTIONS; i++) {
            struct connection *each = &connections[i];
            double due = began + asked / rate;
            if (!each->due && !ended && due <= at)
                ask(each, due), asked++;
            if (each->due && at - each->due > ANSWER_SECONDS)
                fail(each);
            waiting += each->due != 0;
            polled[i].fd = each->due ? each->fd : -1;
            polled[i].events = POLLIN;
        }
        if (ended && !waiting)
            break;
        struct timespec tick = {.tv_nsec = (long)(TICK_SECONDS * 1e9)};
        if (ppoll(polled, CONNECTIONS, &tick, NULL) > 0)
            for (int i = 0; i < CONNECTIONS; i++)
                if (polled[i].fd >= 0 && polled[i].revents)
                    hear(&connections[i]);
        last = now();
    }

    struct rusage used;
    getrusage(RUSAGE_SELF, &used);
    double cpu = used.ru_utime.tv_sec + used.ru_stime.tv_sec +
                 (used.ru_utime.tv_usec + used.ru_stime.tv_usec) / 1e6;
    qsort(took, answered, sizeof *took, shorter);
    size_t most = answered ? answered : 1;
    printf("{\"asked\": %zu, \"failed\": %zu, \"seconds\": %f, \"cpu\": %f, \"median\": %f, "
           "\"p99\": %f, \"slowest\": %f}\n",
           answered + failed, failed, last - began, cpu, took[most / 2] * 1e3,
           took[(size_t)(most * 0.99)] * 1e3, took[most - 1] * 1e3);
    return 0;
}
