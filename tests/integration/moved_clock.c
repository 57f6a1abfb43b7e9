/* Clocks that a test can set while a program runs: preloaded, it adds MOVED_CLOCK's offsets to the time.
 *
 * MOVED_CLOCK is a file with two int64, seconds: what is added to the wall clock, and to CLOCK_MONOTONIC. Whoever
 * writes it moves the clocks of every program that has it mapped: the first alone, as when somebody sets it; both
 * of a program that is stopped, as when it was for so long. Waits that end at a time of either are handed on in
 * the kernel's own time.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile const int64_t *offsets;

__attribute__((constructor)) static void map_offset(void) {
    const char *path = getenv("MOVED_CLOCK");
    int handle = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (handle < 0)
        return;
    void *found = mmap(NULL, 2 * sizeof(int64_t), PROT_READ, MAP_SHARED, handle, 0);
    close(handle);
    if (found != MAP_FAILED)
        offsets = found;
}

static int64_t moved(clockid_t clock) {
    if (!offsets)
        return 0;
    switch (clock) {
    case CLOCK_REALTIME:
    case CLOCK_REALTIME_COARSE:
        return offsets[0];
    case CLOCK_MONOTONIC:
    case CLOCK_MONOTONIC_COARSE:
        return offsets[1];
    default:
        return 0;
    }
}

static void *next(const char *name) { return dlsym(RTLD_NEXT, name); }

int clock_gettime(clockid_t clock, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real)
        real = next("clock_gettime");
    int code = real(clock, now);
    if (code == 0)
        now->tv_sec += moved(clock);
    return code;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    static int (*real)(struct timeval *, void *);
    if (!real)
        real = next("gettimeofday");
    int code = real(now, zone);
    if (code == 0)
        now->tv_sec += moved(CLOCK_REALTIME);
    return code;
}

time_t time(time_t *where) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (where)
        *where = now.tv_sec;
    return now.tv_sec;
}

static struct timespec in_kernel_time(clockid_t clock, const struct timespec *until) {
    struct timespec found = *until;
    found.tv_sec -= moved(clock);
    return found;
}

/* glibc keeps a condition's clock in the second bit of its flags: set is CLOCK_MONOTONIC. */
int pthread_cond_timedwait(pthread_cond_t *condition, pthread_mutex_t *mutex, const struct timespec *until) {
    static int (*real)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
    if (!real)
        real = dlvsym(RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2");
    clockid_t clock = condition->__data.__wrefs & 2 ? CLOCK_MONOTONIC : CLOCK_REALTIME;
    struct timespec kernel = in_kernel_time(clock, until);
    return real(condition, mutex, &kernel);
}

int pthread_cond_clockwait(
    pthread_cond_t *condition, pthread_mutex_t *mutex, clockid_t clock, const struct timespec *until) {
    static int (*real)(pthread_cond_t *, pthread_mutex_t *, clockid_t, const struct timespec *);
    if (!real)
        real = next("pthread_cond_clockwait");
    struct timespec kernel = in_kernel_time(clock, until);
    return real(condition, mutex, clock, &kernel);
}

int sem_timedwait(sem_t *semaphore, const struct timespec *until) {
    static int (*real)(sem_t *, const struct timespec *);
    if (!real)
        real = next("sem_timedwait");
    struct timespec kernel = in_kernel_time(CLOCK_REALTIME, until);
    return real(semaphore, &kernel);
}

int sem_clockwait(sem_t *semaphore, clockid_t clock, const struct timespec *until) {
    static int (*real)(sem_t *, clockid_t, const struct timespec *);
    if (!real)
        real = next("sem_clockwait");
    struct timespec kernel = in_kernel_time(clock, until);
    return real(semaphore, clock, &kernel);
}

int clock_nanosleep(clockid_t clock, int flags, const struct timespec *until, struct timespec *left) {
    static int (*real)(clockid_t, int, const struct timespec *, struct timespec *);
    if (!real)
        real = next("clock_nanosleep");
    struct timespec kernel = in_kernel_time(clock, until);
    return real(clock, flags, flags & TIMER_ABSTIME ? &kernel : until, left);
}
