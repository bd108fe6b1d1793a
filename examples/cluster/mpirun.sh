#!/bin/bash
# Leader SGD over the hosts of an Open MPI host file, one process on each:
#
#   examples/cluster/mpirun.sh HOSTFILE RUN --data.dir DATA [OPTIONS]
#
# mpirun gives every process its rank. The rendezvous is on the first host of the file. A
# process uses all GPUs of its host; with several processes per host each uses one. The same
# command resumes a run that was stopped by SIGTERM or has lost a host. mpirun ends with the
# status of a process; it does not start the run again itself.
set -eu
hostfile=$1
run=$2
shift 2
experiment=${EXPERIMENT:-cifar10-cnn7}
locals=${LOCALS:-4} # workers per node
first=$(sed -n 's/^\([^# ][^ ]*\).*/\1/p' "$hostfile" | head -1)
hosts=$(grep -c '^[^# ]' "$hostfile")

# Seconds from SIGTERM to SIGKILL, for the last checkpoint: by default there is only one. The
# names are those of Open MPI 4 and 5.
export OMPI_MCA_odls_base_sigkill_timeout=120
export PRTE_MCA_odls_base_sigkill_timeout=120

exec "$(dirname "$0")/resume.sh" "$run" \
  mpirun --hostfile "$hostfile" --map-by ppr:1:node -np "$hosts" \
  python -m train "$experiment" \
  --distributed.coordinator "$first:8476" \
  --workers.nodes "$hosts" --workers.locals "$locals" \
  --method.local-pull 0.1 --method.global-pull 0.1 \
  --method.local-period 64 --method.global-period 128 "$@"
