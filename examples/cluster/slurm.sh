#!/bin/bash
# Leader SGD over 4 nodes with 4 GPUs each: sbatch examples/cluster/slurm.sh DATA
#
# One process per GPU, which jax is told by Slurm. With --ntasks-per-node=1 one process has
# a whole node; nothing else changes. When the time is up, or the job is preempted, Slurm
# sends SIGTERM two minutes before the end: all processes save at the same step, and the
# job is queued again and goes on from there.
#SBATCH --job-name=lsgd
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --time=12:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
set -u
data=$1
run=runs/cifar10-$SLURM_JOB_ID
resume=()
if [ -d "$run/checkpoints" ]; then resume=(--resume); fi

srun --kill-on-bad-exit=1 python -m train cifar10-cnn7 \
  --data.dir "$data" \
  --workers.nodes 4 --workers.locals 4 \
  --method.local-pull 0.1 --method.global-pull 0.1 \
  --method.local-period 64 --method.global-period 128 \
  --run-dir "$run" "${resume[@]}"
status=$?

# Once more after a lost process (75; jax aborts with 134; 137 is kill -9), but not for ever,
# and after a stop by SIGTERM, which saves and is no failure.
last=$(grep '"kind": "end"' "$run/metrics.jsonl" | tail -1)
if [[ $status =~ ^(75|134|137)$ && ${SLURM_RESTART_COUNT:-0} -lt 20 ]] ||
  [[ $status -eq 0 && $last == *SIGTERM* ]]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit $status
