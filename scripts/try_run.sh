#!/usr/bin/env bash
# Does 'make run' do what it says? Start it, wait for the dataset, read it, end it, and take it down.
cd "$(dirname "$0")/.."
. scripts/steps.sh
export NODEAGENT_PORT=${NODEAGENT_PORT:-19470}
log=$(mktemp)
make run >"$log" 2>&1 &
run=$!
trap 'kill -TERM "$run" 2>/dev/null || true; wait "$run" || true; scripts/stop.sh; rm -f "$log"' EXIT
ask() { .venv/bin/nodeagent --config build/run/nodeagent.yaml "$@"; }
for _ in $(seq 120); do
  kill -0 "$run" 2>/dev/null || { tail -n 20 "$log"; say "make run ended early"; exit 1; }
  if ask dataset list 2>/dev/null | grep -q complete; then break; fi
  sleep 1
done
ask dataset list | grep complete || { tail -n 20 "$log"; say "the dataset was not complete after two minutes"; exit 1; }
if grep '"level"' "$log"; then say "make run shows log lines amid its progress"; exit 1; fi
grep -q '"level"' build/run/agent.log || { say "the agent's log is not in build/run/agent.log"; exit 1; }
diff -r build/run/source build/run/views/demo/data
files=$(find build/run/views/demo/data -type f | wc -l)
kill -TERM "$run"; wait "$run" || true
scripts/stop.sh
if grep -q "/build/run/views/" /proc/self/mountinfo; then say "make stop left the view mounted"; exit 1; fi
say "make run: $files files read, each as in the source"
