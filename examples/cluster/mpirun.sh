#!/bin/bash
# Leader SGD over the hosts of an Open MPI host file, one process on each:
#
#   examples/cluster/mpirun.sh HOSTFILE RUN --data.dir DATA [OPTIONS]
#
# mpirun gives every process its rank. The rendezvous is on the first host of the file. A
# process uses all GPUs of its host; with several processes per host each uses one. SIGTERM to
# this script saves the run and ends it with 75. The same command resumes it, as it does after
# the loss of a host. mpirun does not start a run again itself.
set -eu
hostfile=$1
run=$2
shift 2
experiment=${EXPERIMENT:-cifar10-cnn7}
locals=${LOCALS:-4} # workers per node
first=$(sed -n 's/^\([^# ][^ ]*\).*/\1/p' "$hostfile" | head -1)
hosts=$(grep -c '^[^# ]' "$hostfile")

"$(dirname "$0")/resume.sh" "$run" \
  mpirun --hostfile "$hostfile" --map-by ppr:1:node -np "$hosts" \
  python -m train "$experiment" \
  --distributed.coordinator "$first:8476" \
  --workers.nodes "$hosts" --workers.locals "$locals" \
  --method.local-pull 0.1 --method.global-pull 0.1 \
  --method.local-period 64 --method.global-period 128 "$@" &
mpirun=$!

# After SIGTERM mpirun kills its processes within a second. SIGUSR1 it only passes on, and the
# trainer takes it for SIGTERM.
trap 'kill -USR1 $mpirun' TERM HUP
set +e
wait $mpirun
status=$?
while [ $status -gt 128 ] && kill -0 $mpirun 2> /dev/null; do
  wait $mpirun # the signal ended the previous wait
  status=$?
done
exit $status
