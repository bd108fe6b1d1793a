#!/bin/bash
# Starts a process again when it fails, N times at most, while the others of its run go on
# (--min-workers):
#
#   examples/cluster/again.sh N COMMAND ...
#
# A SIGTERM, SIGHUP or SIGINT reaches COMMAND as SIGTERM, and nothing is started again after
# it. Nor is it after status 0 or wrong usage (2). The status is the last one of COMMAND.
set -u
most=$1
shift
count=0
child=
is_asked=

pass_on() {
  is_asked=yes
  [ -z "$child" ] || kill -TERM "$child" 2> /dev/null
}
trap pass_on TERM HUP INT

while true; do
  "$@" &
  child=$!
  [ -z "$is_asked" ] || pass_on # the signal came before the number of the process
  wait "$child"
  while kill -0 "$child" 2> /dev/null; do # a signal has ended the wait
    wait "$child"
  done
  wait "$child" # its own status, which bash keeps
  status=$?
  case "$is_asked:$status:$count" in
    yes:* | :0:* | :2:* | :*:"$most") exit "$status" ;;
  esac
  count=$((count + 1))
  echo "ended with status $status: started again in a second ($count of $most)" >&2
  sleep 1
  [ -z "$is_asked" ] || exit "$status"
done
