#!/bin/bash
# Leader SGD over the hosts of an Open MPI host file, one process on each:
#
#   examples/cluster/mpirun.sh HOSTFILE DATA
#
# mpirun gives every process its rank. The rendezvous is on the first host of the file. A
# process uses all GPUs of its host; with several processes per host each uses one.
set -eu
hostfile=$1
data=$2
first=$(sed -n 's/^\([^# ][^ ]*\).*/\1/p' "$hostfile" | head -1)
hosts=$(grep -c '^[^# ]' "$hostfile")

mpirun --hostfile "$hostfile" --map-by ppr:1:node -np "$hosts" \
  python -m train cifar10-cnn7 \
  --distributed.coordinator "$first:8476" \
  --data.dir "$data" \
  --workers.nodes "$hosts" --workers.locals 4 \
  --method.local-pull 0.1 --method.global-pull 0.1 \
  --method.local-period 64 --method.global-period 128
