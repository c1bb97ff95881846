/* Makes a part of one file unreadable: reads of it fail with EIO, until it is written again.

   UNREADABLE="INODE BEGIN END TIMES" names the part, and how many reads fail; -1 for all of them. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

static unsigned long inode;
static long begin, end, times;

__attribute__((constructor)) static void set_up(void) {
    const char *wanted = getenv("UNREADABLE");
    if (wanted) sscanf(wanted, "%lu %ld %ld %ld", &inode, &begin, &end, &times);
}

static int is_ours(int fd) {
    struct stat found;
    return inode && times && fstat(fd, &found) == 0 && found.st_ino == inode;
}

/* How much can be read: what lies before the bad part; -1 when the first byte is bad. */
static ssize_t readable(int fd, size_t count, off_t at) {
    if (!count || !is_ours(fd) || at >= end || at + (off_t)count <= begin) return count;
    if (at < begin) return begin - at;
    if (times > 0) times--;
    errno = EIO;
    return -1;
}

static void written(int fd, size_t count, off_t at) {
    if (is_ours(fd) && at < end && at + (off_t)count > begin) times = 0;
}

static size_t total(const struct iovec *parts, int count) {
    size_t bytes = 0;
    for (int at = 0; at < count; at++) bytes += parts[at].iov_len;
    return bytes;
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

ssize_t read(int fd, void *buffer, size_t count) {
    ssize_t can = readable(fd, count, lseek(fd, 0, SEEK_CUR));
    return can < 0 ? -1 : REAL(read)(fd, buffer, can);
}

ssize_t pread(int fd, void *buffer, size_t count, off_t at) {
    ssize_t can = readable(fd, count, at);
    return can < 0 ? -1 : REAL(pread)(fd, buffer, can, at);
}

ssize_t pread64(int fd, void *buffer, size_t count, off64_t at) {
    return pread(fd, buffer, count, at);
}

ssize_t preadv2(int fd, const struct iovec *parts, int count, off_t at, int flags) {
    size_t bytes = total(parts, count);
    ssize_t can = readable(fd, bytes, at);
    if (can < 0) return -1;
    if (count == 1) {
        struct iovec first = {parts[0].iov_base, can};
        return REAL(preadv2)(fd, &first, 1, at, flags);
    }
    if ((size_t)can < bytes) {
        errno = EIO;
        return -1;
    }
    return REAL(preadv2)(fd, parts, count, at, flags);
}

ssize_t preadv64v2(int fd, const struct iovec *parts, int count, off64_t at, int flags) {
    return preadv2(fd, parts, count, at, flags);
}

ssize_t preadv(int fd, const struct iovec *parts, int count, off_t at) {
    return preadv2(fd, parts, count, at, 0);
}

ssize_t preadv64(int fd, const struct iovec *parts, int count, off64_t at) {
    return preadv2(fd, parts, count, at, 0);
}

ssize_t pwrite(int fd, const void *buffer, size_t count, off_t at) {
    written(fd, count, at);
    return REAL(pwrite)(fd, buffer, count, at);
}

ssize_t pwrite64(int fd, const void *buffer, size_t count, off64_t at) {
    return pwrite(fd, buffer, count, at);
}

ssize_t pwritev2(int fd, const struct iovec *parts, int count, off_t at, int flags) {
    written(fd, total(parts, count), at);
    return REAL(pwritev2)(fd, parts, count, at, flags);
}

ssize_t pwritev64v2(int fd, const struct iovec *parts, int count, off64_t at, int flags) {
    return pwritev2(fd, parts, count, at, flags);
}

ssize_t pwritev(int fd, const struct iovec *parts, int count, off_t at) {
    written(fd, total(parts, count), at);
    return REAL(pwritev)(fd, parts, count, at);
}

ssize_t pwritev64(int fd, const struct iovec *parts, int count, off64_t at) {
    return pwritev(fd, parts, count, at);
}
