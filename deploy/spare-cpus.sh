#!/bin/bash
# A worker on the CPUs and the memory that a program which comes first, such as a trainer, leaves over.
#
#   LEANQ_URL=redis://HOST deploy/spare-cpus.sh --env mathlib=/srv/mathlib
#
# Options go to `leanq worker`. Variables, with their defaults:
#   SPARE_SHARE=0.5        the share of the CPUs
#   SPARE_GB=16            memory of the worker and its Leans together: 2 GB, and 4 GB for each slot
#   SPARE_FREE_GB=8        memory that has to stay available on the machine
#   SPARE_STOP=/tmp/leanq-stop   while this file is there, no worker runs
#
# It looks once a second, and at the worker's processes every five. When it stops the worker, that gives
# back what has not ended within a second. SIGTERM ends both.
set -u
: "${SPARE_SHARE:=0.5}" "${SPARE_GB:=16}" "${SPARE_FREE_GB:=8}" "${SPARE_STOP:=/tmp/leanq-stop}"
pause_s=60  # after memory was short
worker='' why='' said='' looks=0 pids=''
read -r slots cap_kb floor_kb < <(python3 -c "import math, os
cpus = math.ceil(float('$SPARE_SHARE') * len(os.sched_getaffinity(0)) - 1e-9)
print(max(1, min(cpus, int((float('$SPARE_GB') - 2) / 4))),
      *(int(float(gb) * 2**20) for gb in ('$SPARE_GB', '$SPARE_FREE_GB')))") || exit 2

say() { echo "spare-cpus: $*" >&2; }

# Naps without a program to start. The script handles a signal within a second.
exec {never}<> <(:)
nap() {
  local left
  for ((left = $1; left > 0; left--)); do read -r -t 1 -u "$never"; done
}

# Sets kb and pids: the memory of the worker and of all below it, without files that are mapped, and
# the pids of those below. It starts no program, and looks at no other process of the machine.
look_below() {
  local pid file name value kids todo=("$worker")
  kb=0 pids=
  while ((${#todo[@]})); do
    pid=${todo[0]}
    todo=("${todo[@]:1}")
    for file in "/proc/$pid/task"/*/children; do
      kids=()  # a process that has ended leaves the array as it was
      read -r -a kids 2>/dev/null <"$file"
      todo+=("${kids[@]}")
    done
    while read -r name value _; do
      case $name in RssAnon: | RssShmem:) ((kb += value)) ;; esac
    done 2>/dev/null <"/proc/$pid/status"
    [ "$pid" = "$worker" ] || pids+=" $pid"
  done
}

# Where the kernel shares CPUs out by session, niceness counts within a session alone.
make_nice() {
  local said
  for pid; do
    said=''
    read -r said 2>/dev/null <"/proc/$pid/autogroup"
    [[ $said == *' nice 0' ]] && echo 19 2>/dev/null >"/proc/$pid/autogroup"
  done
}

start() {
  # Only the Leans are nice: a worker that is kept waiting would lose its lease.
  leanq worker --nice 19 --cpu-share "$SPARE_SHARE" --slots "$slots" --grace 1 "$@" &
  worker=$!
}

stop() {
  if [ "$why" != "$said" ]; then say "$why: no worker runs"; said=$why; fi
  [ -n "$worker" ] || return 0
  kill -TERM "$worker" 2>/dev/null
  for _ in 1 2 3 4 5 6; do
    kill -0 "$worker" 2>/dev/null || break
    read -r -t 0.5 -u "$never"
  done
  kill -KILL "$worker" 2>/dev/null
  wait "$worker" 2>/dev/null
  worker=
}

trap 'why="a signal"; stop; exit 0' TERM INT
while :; do
  why=
  # Without a program, which would cost more than the look.
  while read -r name free_kb _; do [ "$name" != MemAvailable: ] || break; done </proc/meminfo
  if [ -e "$SPARE_STOP" ]; then
    why="$SPARE_STOP is there"
    stop
  elif ((free_kb < floor_kb)); then
    why="less than $SPARE_FREE_GB GB are available"
    stop
    nap "$pause_s"
  elif [ -z "$worker" ]; then
    said=
    start "$@"
  elif ((++looks % 5 == 0)) && look_below && ((kb > cap_kb)); then
    why="it took more than $SPARE_GB GB"
    stop
    nap "$pause_s"
  elif ! kill -0 "$worker" 2>/dev/null; then
    wait "$worker"
    code=$?
    say "the worker has ended with code $code"
    exit "$code"
  else
    # shellcheck disable=SC2086
    make_nice $pids
    pids=
  fi
  nap 1
done
