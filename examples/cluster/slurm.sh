#!/bin/bash
# Leader SGD over 4 nodes with 4 GPUs each: sbatch examples/cluster/slurm.sh DATA
#
# One process per GPU; jax reads the layout from Slurm. With --ntasks-per-node=1 one process
# has a whole node, and nothing else changes. Before the time limit or a preemption, Slurm
# sends SIGTERM two minutes ahead: all processes save at the same step, and the job is
# requeued and resumes from there.
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

# Requeue after a lost process (75, 134 if jax aborts, 137 for kill -9), at most 20 times,
# and after a stop by SIGTERM, which saves and is not a failure.
last=$(grep '"kind": "end"' "$run/metrics.jsonl" | tail -1)
if [[ $status =~ ^(75|134|137)$ && ${SLURM_RESTART_COUNT:-0} -lt 20 ]] ||
  [[ $status -eq 0 && $last == *SIGTERM* ]]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit $status
