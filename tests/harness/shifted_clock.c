/* Shows a process another time of day, by CLOCK_SHIFT seconds, and has its machine sleep for as many
   seconds as the file SLEPT says. Its coarse clock has a tick every TICK_MS milliseconds. Preloaded
   into a server: libfaketime asks its allocator for memory before that is ready, and the server stands
   still. */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static long shift(void) {
    static long seconds, known;
    if (!known) {
        const char *text = getenv("CLOCK_SHIFT");
        seconds = text ? atol(text) : 0;
        known = 1;
    }
    return seconds;
}

static long slept(void) {
    const char *path = getenv("SLEPT");
    FILE *file = path ? fopen(path, "r") : NULL;
    long seconds = 0;
    if (file) {
        if (fscanf(file, "%ld", &seconds) != 1) {
            seconds = 0;
        }
        fclose(file);
    }
    return seconds;
}

static long tick(void) {
    const char *text = getenv("TICK_MS");
    return text ? atol(text) : 0;
}

int clock_gettime(clockid_t id, struct timespec *now) {
    int result = (int)syscall(SYS_clock_gettime, id, now);
    if (result == 0 && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) {
        now->tv_sec += shift();
        if (id == CLOCK_REALTIME_COARSE && tick() > 0) {
            long ms = now->tv_sec * 1000 + now->tv_nsec / 1000000;
            ms -= ms % tick();
            now->tv_sec = ms / 1000;
            now->tv_nsec = ms % 1000 * 1000000;
        }
    } else if (result == 0 && id == CLOCK_BOOTTIME) {
        now->tv_sec += slept();
    }
    return result;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    (void)zone;
    struct timespec precise;
    int result = clock_gettime(CLOCK_REALTIME, &precise);
    now->tv_sec = precise.tv_sec;
    now->tv_usec = precise.tv_nsec / 1000;
    return result;
}

time_t time(time_t *at) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (at) {
        *at = now.tv_sec;
    }
    return now.tv_sec;
}
