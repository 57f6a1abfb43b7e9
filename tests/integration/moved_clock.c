/* A wall clock that a test can set while a program runs: preloaded, it adds MOVED_CLOCK's offset to the time.
 *
 * MOVED_CLOCK is a file with one int64, seconds; whoever writes it moves the clock of every program that has it
 * mapped. Only the wall clock moves, as when somebody sets it: CLOCK_MONOTONIC and the rest stay as they are.
 * Waits that end at a time of the wall clock are handed on in the kernel's own time.
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

static volatile const int64_t *offset;

__attribute__((constructor)) static void map_offset(void) {
    const char *path = getenv("MOVED_CLOCK");
    int handle = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (handle < 0)
        return;
    void *found = mmap(NULL, sizeof(int64_t), PROT_READ, MAP_SHARED, handle, 0);
    close(handle);
    if (found != MAP_FAILED)
        offset = found;
}

static int64_t moved(void) { return offset ? *offset : 0; }

static void *next(const char *name) { return dlsym(RTLD_NEXT, name); }

int clock_gettime(clockid_t clock, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real)
        real = next("clock_gettime");
    int code = real(clock, now);
    if (code == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
        now->tv_sec += moved();
    return code;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    static int (*real)(struct timeval *, void *);
    if (!real)
        real = next("gettimeofday");
    int code = real(now, zone);
    if (code == 0)
        now->tv_sec += moved();
    return code;
}

time_t time(time_t *where) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (where)
        *where = now.tv_sec;
    return now.tv_sec;
}

static struct timespec in_kernel_time(const struct timespec *until) {
    struct timespec found = *until;
    found.tv_sec -= moved();
    return found;
}

/* glibc keeps a condition's clock in the second bit of its flags: set is CLOCK_MONOTONIC. */
int pthread_cond_timedwait(pthread_cond_t *condition, pthread_mutex_t *mutex, const struct timespec *until) {
    static int (*real)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
    if (!real)
        real = dlvsym(RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2");
    struct timespec wall = in_kernel_time(until);
    return real(condition, mutex, condition->__data.__wrefs & 2 ? until : &wall);
}

int sem_timedwait(sem_t *semaphore, const struct timespec *until) {
    static int (*real)(sem_t *, const struct timespec *);
    if (!real)
        real = next("sem_timedwait");
    struct timespec wall = in_kernel_time(until);
    return real(semaphore, &wall);
}
