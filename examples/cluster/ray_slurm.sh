#!/bin/bash
# Asynchronous LSGD over 4 nodes with 4 GPUs each: sbatch examples/cluster/ray_slurm.sh DATA
#
# `ray symmetric-run` runs on every node: it starts Ray there, on the first node runs the
# command, which trains and tests, and ends Ray with it. Each worker is a process of Ray with
# a GPU of its own; one that is lost is started again while the others go on. The nodes must
# be for this job alone: symmetric-run refuses one where Ray runs, and ends all Ray on its own.
#
# Two minutes before the time is up, or when the job is preempted, Slurm signals this script
# only: it asks the trainer to save, and not Ray, whose workers it would end at once. Then the
# job is queued again and goes on from there.
#SBATCH --job-name=lsgd-async
#SBATCH --nodes=4
#SBATCH --exclusive
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=32
#SBATCH --time=12:00:00
#SBATCH --signal=B:TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
set -u
data=$1
run=runs/cifar10-async-$SLURM_JOB_ID
resume=()
if [ -d "$run/checkpoints" ]; then resume=(--resume); fi

# A head of Ray may turn token authentication on by itself, and then refuses the other nodes
# (InvalidAuthToken) unless all of them, and the trainer, are told so and have the same token.
# It lies in ~/.ray/auth_token: the home folder must be one that all nodes share.
export RAY_AUTH_MODE=token
ray get-auth-token --generate > /dev/null

export RAY_USAGE_STATS_ENABLED=0
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -1)
head=$(getent ahostsv4 "$head" | awk 'NR == 1 {print $1}') # as the other nodes reach it
pid=$run.pid
mkdir -p runs

srun --kill-on-bad-exit=1 ray symmetric-run \
  --address "$head:6379" --min-nodes "$SLURM_JOB_NUM_NODES" \
  --num-gpus 4 --num-cpus "$SLURM_CPUS_PER_TASK" -- \
  bash -c 'echo $$ > "$0"; exec "$@"' "$pid" \
  python -m train cifar10-cnn7 \
  --data.dir "$data" \
  --workers.nodes 4 --workers.locals 4 \
  --method async-lsgd \
  --method.local-pull 0.1 --method.global-pull 0.1 \
  --method.local-period 64 --method.global-period 128 \
  --ray.address auto --ray.gpus-per-worker 1 --ray.cpus-per-worker 4 \
  --run-dir "$run" "${resume[@]}" &
step=$!
trap 'kill -TERM "$(cat "$pid")"' TERM # this script and the trainer are on the first node
wait $step
status=$?
while [ $status -gt 128 ] && kill -0 $step 2> /dev/null; do
  wait $step # it was the signal that ended the wait
  status=$?
done
rm -f "$pid"

# A stop by SIGTERM saves and is no failure: once more. Workers that are lost Ray starts again.
last=$(grep -s '"kind": "end"' "$run/metrics.jsonl" | tail -1)
if [ $status -eq 0 ] && [ -z "$last" ]; then
  status=1 # symmetric-run says nothing if Ray does not start
fi
if [[ $status -eq 0 && $last == *SIGTERM* ]]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit $status
