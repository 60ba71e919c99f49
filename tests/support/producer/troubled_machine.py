"""A server's machine, whose clock jumps and whose disk is slow while the server runs.

A library that is loaded before the C library (LD_PRELOAD) stands between both: it adds to the time
of day, and waits before each fsync and fdatasync, as much as two numbers of a mapped file say. Time
that does not jump (CLOCK_MONOTONIC) is left alone, as a machine leaves it.
"""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
from collections.abc import Mapping
from pathlib import Path

_PRELOADED = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile int64_t *trouble_us; /* how far the clock is ahead; how long a sync takes */
static int (*real_clock)(clockid_t, struct timespec *);

__attribute__((constructor)) static void begin(void) {
  int file = open(getenv("TROUBLE"), O_RDONLY);
  trouble_us = mmap(0, 2 * sizeof *trouble_us, PROT_READ, MAP_SHARED, file, 0);
  if (trouble_us == MAP_FAILED) abort();
  close(file);
  real_clock = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
}

int clock_gettime(clockid_t which, struct timespec *now) {
  int failed = real_clock(which, now);
  if (!failed && (which == CLOCK_REALTIME || which == CLOCK_REALTIME_COARSE)) {
    int64_t us = now->tv_sec * 1000000LL + now->tv_nsec / 1000 + trouble_us[0];
    now->tv_sec = us / 1000000;
    now->tv_nsec = us % 1000000 * 1000;
  }
  return failed;
}

int gettimeofday(struct timeval *now, void *zone) {
  struct timespec precise;
  (void)zone;
  int failed = clock_gettime(CLOCK_REALTIME, &precise);
  now->tv_sec = precise.tv_sec;
  now->tv_usec = precise.tv_nsec / 1000;
  return failed;
}

time_t time(time_t *also) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (also) *also = now.tv_sec;
  return now.tv_sec;
}

static void wait_for_disk(void) {
  struct timespec wait = {trouble_us[1] / 1000000, trouble_us[1] % 1000000 * 1000};
  if (trouble_us[1]) nanosleep(&wait, 0);
}

int fsync(int file) { wait_for_disk(); return syscall(SYS_fsync, file); }
int fdatasync(int file) { wait_for_disk(); return syscall(SYS_fdatasync, file); }
"""

COMPILER = shutil.which("cc")


class TroubledMachine:
    """Of one server: its processes are started with :attr:`environ`. Without a compiler there is
    no trouble to be made.

    Args:
        place: where its library and its file are made; the folder is there.
    """

    def __init__(self, place: Path) -> None:
        self.environ: Mapping[str, str] = {}
        if COMPILER is None:
            return
        library = place.with_suffix(".so")
        made = [COMPILER, "-O1", "-shared", "-fPIC", "-x", "c", "-", "-o", str(library), "-ldl"]
        subprocess.run(made, input=_PRELOADED.encode(), check=True, timeout=60)
        self._file = place.with_suffix(".trouble")
        self._file.write_bytes(bytes(16))
        self.environ = {"LD_PRELOAD": str(library), "TROUBLE": str(self._file)}

    def set_clock(self, ahead_s: float) -> None:
        """Sets its clock, so far ahead of the time."""
        self._write(0, ahead_s)

    def slow_down(self, sync_s: float) -> None:
        """From now on its disk takes so long to be in sync; 0: as long as it takes."""
        self._write(8, sync_s)

    def _write(self, offset: int, seconds: float) -> None:
        assert self.environ, "no compiler here (cc)"
        with self._file.open("r+b") as file:
            os.pwrite(file.fileno(), struct.pack("q", round(seconds * 1e6)), offset)
