#!/bin/bash
# The scaler, as a job. Slurm runs one of this name at a time. Submit several: each takes over when the
# one before has reached its time limit.
#SBATCH --job-name=leanq-scaler
#SBATCH --dependency=singleton
#SBATCH --cpus-per-task=1
#SBATCH --mem=1G
#SBATCH --time=7-00:00:00
#SBATCH --requeue
#SBATCH --output=scaler.log
#SBATCH --open-mode=append
set -euo pipefail
until [ -s url ]; do sleep 1; done  # redis.sh writes it
LEANQ_URL=$(<url) LEANQ_PASSWORD=$(<password)
export LEANQ_URL LEANQ_PASSWORD
exec leanq scale --target slurm --script worker.sh ${SCALER_OPTIONS:---max-workers 200}
