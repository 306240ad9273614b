/* A disk that fails on demand, for LD_PRELOAD. It changes only calls on files below FAILING_DISK. The file
 * FAILING_DISK_ORDERS has a word and a number per line. It is read before each call, so that a test can change it
 * while the process runs:
 *
 *   full 1     writes and allocations fail with ENOSPC
 *   error 1    reads, writes and syncs fail with EIO
 *   gone 1     every call fails with ENODEV
 *   hang 1     reads do not return until the line is removed
 *   torn 1     a write of blocks (pwritev) writes only the first half and reports success
 *   flip 1     a read returns a flipped bit
 *   short 1    reads and writes transfer half of the bytes, and report how many
 *   slow 50    every call takes so many milliseconds longer
 *   clock-back 60   the wall clock is so many seconds behind; together with `hang`, once a call hangs
 *
 * A direct transfer is halved in multiples of 4 KiB. Each injected fault appends a byte to FAILING_DISK_ORDERS.done.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { PIECE = 4096 };

static volatile int hangs;

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

/* Return the number that follows a word in the orders, or 0. This uses system calls, because the library replaces the
 * C library's functions. */
static long ordered(const char *word)
{
    char text[1024], *line, *rest = text;
    const char *path = getenv("FAILING_DISK_ORDERS");
    int descriptor = path ? (int)syscall(SYS_openat, AT_FDCWD, path, O_RDONLY | O_CLOEXEC) : -1;
    long size = descriptor < 0 ? 0 : syscall(SYS_read, descriptor, text, sizeof text - 1);
    if (descriptor >= 0)
        syscall(SYS_close, descriptor);
    text[size > 0 ? size : 0] = 0;
    while ((line = strsep(&rest, "\n"))) {
        size_t length = strlen(word);
        if (!strncmp(line, word, length) && line[length] == ' ')
            return atol(line + length);
    }
    return 0;
}

static void pause_ms(long ms)
{
    struct timespec time = {ms / 1000, ms % 1000 * 1000000};
    nanosleep(&time, NULL);
}

static void note(void)
{
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s.done", getenv("FAILING_DISK_ORDERS"));
    int descriptor = (int)syscall(SYS_openat, AT_FDCWD, path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    if (descriptor >= 0) {
        syscall(SYS_write, descriptor, "x", 1);
        syscall(SYS_close, descriptor);
    }
}

static int is_below(const char *path)
{
    const char *root = getenv("FAILING_DISK");
    return root && !strncmp(path, root, strlen(root));
}

static int is_ours(int descriptor)
{
    char link[64], path[PATH_MAX];
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    ssize_t size = readlink(link, path, sizeof path - 1);
    path[size > 0 ? size : 0] = 0;
    return size > 0 && is_below(path);
}

static int fails(int number)
{
    note();
    errno = number;
    return -1;
}

/* Return -1 and set errno if the call must fail, else 0. Delay the call first, as ordered. */
static int stopped(int is_read, int is_write)
{
    if (ordered("slow"))
        pause_ms(ordered("slow"));
    if (is_read && ordered("hang")) {
        note();
        hangs = 1;
        while (ordered("hang"))
            pause_ms(10);
        hangs = 0;
    }
    if (ordered("gone"))
        return fails(ENODEV);
    if (ordered("error"))
        return fails(EIO);
    return is_write && ordered("full") ? fails(ENOSPC) : 0;
}

int clock_gettime(clockid_t clock, struct timespec *now)
{
    static int (*real)(clockid_t, struct timespec *);
    if (!real)
        real = REAL(clock_gettime);
    int code = real(clock, now);
    if (!code && clock == CLOCK_REALTIME && ordered("clock-back") && (hangs || !ordered("hang"))) {
        now->tv_sec -= ordered("clock-back");
        note();
    }
    return code;
}

static size_t half_of(size_t size)
{
    size_t half = size / 2;
    return half >= PIECE ? half / PIECE * PIECE : size % PIECE ? (half ? half : size) : size;
}

/* Copy the buffers up to a total size; return how many are used. */
static int cut(const struct iovec *from, int count, struct iovec *to, size_t size)
{
    int used = 0;
    for (; used < count && size; used++) {
        to[used] = from[used];
        to[used].iov_len = from[used].iov_len < size ? from[used].iov_len : size;
        size -= to[used].iov_len;
    }
    return used;
}

static size_t total(const struct iovec *buffers, int count)
{
    size_t size = 0;
    for (int i = 0; i < count; i++)
        size += buffers[i].iov_len;
    return size;
}

static ssize_t read_into(int descriptor, const struct iovec *buffers, int count, off64_t offset)
{
    struct iovec some[64];
    __typeof__(&preadv64) real = REAL(preadv64);
    if (!is_ours(descriptor) || count > 64)
        return real(descriptor, buffers, count, offset);
    if (stopped(1, 0))
        return -1;
    if (ordered("short")) {
        note();
        count = cut(buffers, count, some, half_of(total(buffers, count)));
        buffers = some;
    }
    ssize_t size = real(descriptor, buffers, count, offset);
    if (size > 0 && ordered("flip")) {
        note();
        *(char *)buffers[0].iov_base ^= 1;
    }
    return size;
}

static ssize_t write_from(int descriptor, const struct iovec *buffers, int count, off64_t offset, int may_tear)
{
    struct iovec some[64];
    __typeof__(&pwritev64) real = REAL(pwritev64);
    if (!is_ours(descriptor) || count > 64)
        return real(descriptor, buffers, count, offset);
    if (stopped(0, 1))
        return -1;
    size_t size = total(buffers, count);
    int is_torn = may_tear && ordered("torn");
    if (!ordered("short") && !is_torn)
        return real(descriptor, buffers, count, offset);
    int used = cut(buffers, count, some, is_torn ? size / 2 / 512 * 512 : half_of(size));
    note();
    if (!used)
        return (ssize_t)size;
    ssize_t done = real(descriptor, some, used, offset);
    if (is_torn && done < 0 && errno == EINVAL) /* less than a sector cannot be written by direct I/O */
        return (ssize_t)size;
    return is_torn && done >= 0 ? (ssize_t)size : done;
}

/* CPython calls these for os.preadv, os.pwritev, os.pread and os.pwrite. */
ssize_t preadv64v2(int descriptor, const struct iovec *buffers, int count, off64_t offset, int flags)
{
    (void)flags;
    return read_into(descriptor, buffers, count, offset);
}

ssize_t pwritev64v2(int descriptor, const struct iovec *buffers, int count, off64_t offset, int flags)
{
    (void)flags;
    return write_from(descriptor, buffers, count, offset, 1);
}

ssize_t pread64(int descriptor, void *data, size_t size, off64_t offset)
{
    struct iovec one = {data, size};
    return read_into(descriptor, &one, 1, offset);
}

ssize_t pwrite64(int descriptor, const void *data, size_t size, off64_t offset)
{
    struct iovec one = {(void *)data, size};
    return write_from(descriptor, &one, 1, offset, 0);
}

int posix_fallocate64(int descriptor, off64_t offset, off64_t size)
{
    if (is_ours(descriptor) && stopped(0, 1))
        return errno;
    return REAL(posix_fallocate64)(descriptor, offset, size);
}

int fdatasync(int descriptor)
{
    if (is_ours(descriptor) && stopped(0, 0))
        return -1;
    return REAL(fdatasync)(descriptor);
}

int fsync(int descriptor)
{
    if (is_ours(descriptor) && stopped(0, 0))
        return -1;
    return REAL(fsync)(descriptor);
}

int renameat(int from, const char *old, int to, const char *new)
{
    if (is_ours(to) && stopped(0, 0))
        return -1;
    return REAL(renameat)(from, old, to, new);
}

int openat64(int folder, const char *path, int flags, ...)
{
    mode_t mode = 0;
    if (flags & O_CREAT) {
        va_list rest;
        va_start(rest, flags);
        mode = va_arg(rest, mode_t);
        va_end(rest);
    }
    if (is_ours(folder) && (ordered("gone") || ordered("error")) && stopped(0, 0))
        return -1;
    return REAL(openat64)(folder, path, flags, mode);
}
