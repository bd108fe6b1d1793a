#!/bin/bash
# Leader SGD over 4 nodes with 4 GPUs each: sbatch examples/cluster/slurm.sh --data.dir DATA [OPTIONS]
#
# One process per GPU; the trainer reads the layout from Slurm. With --ntasks-per-node=1 one
# process has a whole node, and nothing else changes. Before the time limit or a preemption,
# Slurm sends SIGTERM two minutes ahead: all processes save at the same step and end with 75,
# and the job is requeued and resumes from there.
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
experiment=${EXPERIMENT:-cifar10-cnn7}
locals=${LOCALS:-4} # workers per node
run=${RUN:-runs/$experiment-$SLURM_JOB_ID}

examples/cluster/resume.sh "$run" \
  srun --kill-on-bad-exit=1 python -m train "$experiment" \
  --workers.nodes "$SLURM_JOB_NUM_NODES" --workers.locals "$locals" \
  --method.local-pull 0.1 --method.global-pull 0.1 \
  --method.local-period 64 --method.global-period 128 "$@"
status=$?

# Requeue a run that was saved after SIGTERM or has lost a process (75; 134 if jax aborts, 137
# for kill -9, 143 for SIGTERM before training began). srun returns the highest status of its
# tasks, so that of a program error is hidden by 75: resume.sh ends a run that only repeats it.
if [[ $status =~ ^(75|134|137|143)$ ]]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit $status
