#!/bin/bash
# One worker, as a task of a job array. The scaler submits it; so can you:
# sbatch --job-name=leanq-default --array=0-7 worker.sh
#SBATCH --cpus-per-task=8
#SBATCH --mem=32G
#SBATCH --time=1-00:00:00
#SBATCH --requeue
#SBATCH --signal=B:TERM@30
#SBATCH --output=worker-%A_%a.log
set -euo pipefail
LEANQ_URL=$(<url) LEANQ_PASSWORD=$(<password)
export LEANQ_URL LEANQ_PASSWORD
# Compiled files and snapshots belong on the node's own disk.
export LEANQ_CACHE=${SLURM_TMPDIR:-${TMPDIR:-/tmp}}/leanq-$(id -un)
mkdir -p -m 700 "$LEANQ_CACHE"
[ -O "$LEANQ_CACHE" ] || { echo "$LEANQ_CACHE belongs to another user" >&2; exit 3; }
# Without exec the signal would reach this shell, and the worker would not drain. Where no scaler is
# left, workers end after 15 minutes without a request.
exec leanq worker --slots "$SLURM_CPUS_PER_TASK" --grace 20 \
  --exit-when-idle 900 --exit-when-away 300 ${WORKER_OPTIONS:-}
