#!/bin/bash
# The queue's Redis, as a job. Submit it in a folder on a shared disk that only you can read: there it
# keeps the password, its address and its data. Workers keep the address that they began with, so
# give it a node of its own by --nodelist, in a partition that nobody preempts.
#SBATCH --job-name=leanq-redis
#SBATCH --dependency=singleton
#SBATCH --requeue
#SBATCH --cpus-per-task=2
#SBATCH --mem=16G
#SBATCH --time=7-00:00:00
#SBATCH --output=redis.log
set -euo pipefail
umask 077
mkdir -p data
[ -s password ] || python3 -c 'import secrets; print(secrets.token_hex(32))' > password
port=${REDIS_PORT:-6379}
# The wheel's server (the extra "local"), or one on PATH.
server=$(python3 -c 'from leanq.local import find_server; print(find_server() or "")')
: "${server:?expected valkey-server, redis-server or leanq[local]; found none}"
echo "redis://$(hostname -f):$port" > url.new
mv url.new url
# Options from standard input stand in no list of processes.
exec "$server" - < <(
  cat <<END
port $port
bind 0.0.0.0
requirepass $(<password)
dir $PWD/data
appendonly yes
save ""
maxmemory-policy noeviction
END
)
