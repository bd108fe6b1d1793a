#!/bin/bash
# Asynchronous LSGD over 4 nodes with 4 GPUs each:
#
#   sbatch examples/cluster/ray_slurm.sh --data.dir DATA [OPTIONS]
#
# `ray symmetric-run` runs on every node. It starts Ray there, runs the command on the first
# node, which trains and tests, and stops Ray afterwards. Each worker is a Ray process with
# its own GPU; a lost worker is restarted while the others continue. The nodes must be
# exclusive to this job: symmetric-run refuses a node where Ray runs, and it stops every Ray
# process on its node.
#
# Two minutes before the time limit, or at a preemption, Slurm signals this script only. The
# script asks the trainer to save, which then ends with 75; a signal to Ray would end the
# workers at once. The job is requeued and resumes from there.
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
experiment=${EXPERIMENT:-cifar10-cnn7}
locals=${LOCALS:-4} # workers per node
gpus=${GPUS:-4}     # per node
run=${RUN:-runs/$experiment-async-$SLURM_JOB_ID}

# Ray's head may enable token authentication by default. It then refuses other nodes
# (InvalidAuthToken) unless all nodes and the trainer enable it with the same token. The
# token is in ~/.ray/auth_token, so all nodes must share the home folder.
export RAY_AUTH_MODE=token
(umask 077; ray get-auth-token --generate > /dev/null)

export RAY_USAGE_STATS_ENABLED=0
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -1)
head=$(getent ahostsv4 "$head" | awk 'NR == 1 {print $1}') # as the other nodes reach it
pid=$run.pid
rm -f "$pid"

examples/cluster/resume.sh "$run" srun --kill-on-bad-exit=1 ray symmetric-run \
  --address "$head:6379" --min-nodes "$SLURM_JOB_NUM_NODES" \
  --num-gpus "$gpus" --num-cpus "$SLURM_CPUS_PER_TASK" -- \
  bash -c 'echo $$ > "$0"; exec "$@"' "$pid" \
  python -m train "$experiment" \
  --workers.nodes "$SLURM_JOB_NUM_NODES" --workers.locals "$locals" \
  --method async-lsgd \
  --method.local-pull 0.1 --method.global-pull 0.1 \
  --method.local-period 64 --method.global-period 128 \
  --ray.address auto --ray.gpus-per-worker 1 --ray.cpus-per-worker 4 "$@" &
step=$!
trap 'kill -TERM "$(cat "$pid")"' TERM # this script and the trainer are on the first node
wait $step
status=$?
while [ $status -gt 128 ] && kill -0 $step 2> /dev/null; do
  wait $step # the signal ended the previous wait
  status=$?
done

# symmetric-run exits with 0 if Ray does not start, so that the trainer has not, either.
if [ $status -eq 0 ] && [ ! -e "$pid" ]; then status=1; fi
rm -f "$pid"

# Requeue after a stop by SIGTERM, which saves. Ray itself restarts lost workers.
if [ $status -eq 75 ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit $status
