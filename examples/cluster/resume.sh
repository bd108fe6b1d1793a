#!/bin/bash
# Starts a run, or resumes it if it has begun, for schedulers that repeat the same command:
#
#   examples/cluster/resume.sh RUN COMMAND ...
#
# Runs COMMAND with --run-dir RUN, and with --resume if the run has begun. A program error
# would be repeated as often as the scheduler allows, so a restart that has written no new
# checkpoint is the last one: after it, this script ends with status 2. RUN.restarts holds the
# step of the last checkpoint at the last start.
set -u
run=$1
shift

if [ -e "$run/config.json" ]; then
  resume=--resume
  newest=$(ls "$run/checkpoints" 2> /dev/null | grep -x '[0-9]*' | sort -n | tail -1)
  newest=${newest:-none}
else
  resume=
  newest=none
fi

# One process decides if several call this script: the first pod, task or rank.
rank=${JOB_COMPLETION_INDEX:-${SLURM_PROCID:-${OMPI_COMM_WORLD_RANK:-${RANK:-0}}}}
if [ "$rank" = 0 ]; then
  mkdir -p "$(dirname "$run")" || exit
  if [ ! -e "$run.restarts" ]; then
    echo first > "$run.restarts" || exit
  elif [ "$(cat "$run.restarts")" = "$newest" ]; then
    echo "error: the last restart of $run has written no checkpoint (the newest one: $newest)," \
      "so the run is not started again: see why it ended, and delete $run.restarts" >&2
    exit 2
  else
    echo "$newest" > "$run.restarts" || exit
  fi
fi
exec "$@" --run-dir "$run" ${resume:+"$resume"}
