/* Kills the process at the n-th call that changes what lies below a folder. Preloaded: it sees Python, Arrow and Rust.

   A call is counted before it is made, and told to `told`, a file descriptor, in a line of its own. A write gets half way
   before the end comes; further writes to the same file count as one with the first, since whatever follows them finds
   all that they wrote. With n = 0 nothing is killed. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static char root[PATH_MAX];
static size_t root_length;
static long kill_at;
static int told = -1;
static atomic_long calls;
static atomic_int writing = -1; /* the file that the last counted call wrote to */

void rankscope_arm(const char *folder, long n, int descriptor) {
  snprintf(root, sizeof root, "%s", folder);
  kill_at = n;
  told = descriptor;
  atomic_store(&calls, 0);
  atomic_store(&writing, -1);
  root_length = strlen(root);
}

/* A program of its own is armed by its environment. */
__attribute__((constructor)) static void arm_by_environment(void) {
  const char *folder = getenv("RANKSCOPE_KILL_FOLDER"), *at = getenv("RANKSCOPE_KILL_AT");
  if (folder && at) rankscope_arm(folder, atol(at), STDERR_FILENO);
}

#define GENUINE(name) ({ static __typeof__(&name) found; if (!found) found = dlsym(RTLD_NEXT, #name); found; })

static void end(void) {
  kill(getpid(), SIGKILL);
  for (;;) pause();
}

/* Whether this is the last call. */
static int counted(const char *call, const char *path) {
  if (!root_length || !path || strncmp(path, root, root_length) || (path[root_length] && path[root_length] != '/')) return 0;
  long number = atomic_fetch_add(&calls, 1) + 1;
  char line[PATH_MAX + 64];
  int length = snprintf(line, sizeof line, "%s %s\n", call, path + root_length);
  if (length > 0 && GENUINE(write)(told, line, (size_t)length < sizeof line ? (size_t)length : sizeof line - 1) < 0) end();
  return number == kill_at;
}

static void reached(const char *call, const char *path) {
  atomic_store(&writing, -1);
  if (counted(call, path)) end();
}

static int counted_open(const char *call, int descriptor) {
  char link[64], path[PATH_MAX];
  if (!root_length || descriptor == told) return 0;
  int before = atomic_exchange(&writing, *call == 'w' ? descriptor : -1);
  if (*call == 'w' && before == descriptor) return 0;
  snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
  ssize_t length = readlink(link, path, sizeof path - 1);
  if (length < 0) return 0;
  path[length] = 0;
  return counted(call, path);
}

static void opening(const char *path, int flags) { if (flags & (O_CREAT | O_TRUNC)) reached("create", path); }

#define MODE(flags) ({ mode_t mode = 0; if ((flags) & (O_CREAT | O_TMPFILE)) { va_list rest; va_start(rest, flags); mode = va_arg(rest, mode_t); va_end(rest); } mode; })

int open(const char *path, int flags, ...) { mode_t mode = MODE(flags); opening(path, flags); return GENUINE(open)(path, flags, mode); }
int open64(const char *path, int flags, ...) { mode_t mode = MODE(flags); opening(path, flags); return GENUINE(open64)(path, flags, mode); }
int openat(int at, const char *path, int flags, ...) { mode_t mode = MODE(flags); opening(path, flags); return GENUINE(openat)(at, path, flags, mode); }
int openat64(int at, const char *path, int flags, ...) { mode_t mode = MODE(flags); opening(path, flags); return GENUINE(openat64)(at, path, flags, mode); }

ssize_t write(int descriptor, const void *bytes, size_t count) {
  if (counted_open("write", descriptor)) { if (GENUINE(write)(descriptor, bytes, count / 2) < 0) end(); end(); }
  return GENUINE(write)(descriptor, bytes, count);
}
ssize_t writev(int descriptor, const struct iovec *parts, int count) {
  if (counted_open("write", descriptor)) end();
  return GENUINE(writev)(descriptor, parts, count);
}
ssize_t pwrite64(int descriptor, const void *bytes, size_t count, off64_t offset) {
  if (counted_open("write", descriptor)) end();
  return GENUINE(pwrite64)(descriptor, bytes, count, offset);
}
int ftruncate64(int descriptor, off64_t size) { if (counted_open("truncate", descriptor)) end(); return GENUINE(ftruncate64)(descriptor, size); }
int fsync(int descriptor) { if (counted_open("sync", descriptor)) end(); return GENUINE(fsync)(descriptor); }
int fdatasync(int descriptor) { if (counted_open("sync", descriptor)) end(); return GENUINE(fdatasync)(descriptor); }

int rename(const char *from, const char *to) { reached("rename", to); return GENUINE(rename)(from, to); }
int renameat(int at, const char *from, int other, const char *to) { reached("rename", to); return GENUINE(renameat)(at, from, other, to); }
int link(const char *from, const char *to) { reached("link", to); return GENUINE(link)(from, to); }
int linkat(int at, const char *from, int other, const char *to, int flags) { reached("link", to); return GENUINE(linkat)(at, from, other, to, flags); }
int unlink(const char *path) { reached("unlink", path); return GENUINE(unlink)(path); }
int unlinkat(int at, const char *path, int flags) { reached("unlink", path); return GENUINE(unlinkat)(at, path, flags); }
int mkdir(const char *path, mode_t mode) { reached("mkdir", path); return GENUINE(mkdir)(path, mode); }
int rmdir(const char *path) { reached("rmdir", path); return GENUINE(rmdir)(path); }
